// A generation whose rows of attention are all here: the text, coloured by what one token or all of
// them looked at, and a grid with a strip for each head of each layer.

import { Coloured, RowChoice, colourAndList, moveFocus, visible } from "./coloured.js";
import { count, element, field, html, quoted } from "./dom.js";
import { heats } from "./rows.js";

const CELL = { height: 14, gap: 3 }; // of the grid, in CSS pixels

export class AttentionView {
  // onchange is called when another layer or head is chosen.
  constructor({ onchange }) {
    this.onchange = onchange;
    this.choice = new RowChoice(() => {
      this.later();
      this.onchange();
    });
    this.text = html`<p class="tokens" role="group" aria-label="Text"></p>`;
    this.what = html`<p class="what" role="status"></p>`;
    this.legend = html`<span class="legend note" aria-hidden="true"></span>`;
    this.slider = html`<input type="range" min="0" max="0" value="0"
      @input=${() => this.choose(this.slider.valueAsNumber - 1)}>`;
    this.listed = html`<ol class="bars"></ol>`;
    this.grid = html`<canvas class="heads" role="img"></canvas>`;
    this.gridNote = html`<p class="note"></p>`;
    this.node = html`<div class="beside" hidden>
      <div>
        ${this.text}
        <div class="over">${this.what}${this.legend}</div>
        ${field("Generated token", this.slider)}
      </div>
      <div>
        ${this.choice.nodes}
        <h3>Heads</h3>
        ${this.grid}${this.gridNote}
        <h3>Looked at most</h3>
        ${this.listed}
      </div>
    </div>`;
    this.listen();
    this.begin([]);
    this.node.hidden = true;
  }

  get layer() {
    return this.choice.layer;
  }

  get head() {
    return this.choice.head;
  }

  listen() {
    const at = ({ target }) => {
      const column = this.nodes.indexOf(target.closest?.(".token"));
      return column < this.nPrompt ? undefined : column - this.nPrompt;
    };
    this.text.addEventListener("pointerover", (event) => this.point(at(event)));
    this.text.addEventListener("pointerleave", () => this.point(undefined));
    this.text.addEventListener("click", (event) => {
      const n = at(event);
      if (n !== undefined && !String(getSelection())) this.choose(n === this.chosen ? -1 : n);
    });
    this.text.addEventListener("focusin", (event) => this.choose(at(event)));
    this.text.addEventListener("keydown", (event) =>
      moveFocus(event, this.nodes.slice(this.nPrompt), at(event)),
    );
    this.grid.addEventListener("click", ({ offsetX, offsetY }) => {
      const { nLayers = 1, nHeads = 1 } = this.choice;
      const l = Math.floor((offsetY / this.grid.clientHeight) * nLayers);
      const h = Math.floor((offsetX / this.grid.clientWidth) * nHeads);
      const isChosen = this.layer === l && this.head === h;
      if (isChosen) this.choice.choose(undefined, undefined);
      else this.choice.choose(l, h);
    });
    new ResizeObserver(() => this.later()).observe(this.grid);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.later());
  }

  // Begins with the texts of the prompt's tokens.
  begin(texts) {
    this.texts = [...texts];
    this.nPrompt = texts.length;
    this.rows = [];
    this.isWhole = false;
    this.chosen = this.pointed = undefined;
    this.nodes = texts.map((text) => element("span", { class: "token given" }, visible(text)));
    this.coloured = new Coloured((column) => this.nodes[column] && [this.nodes[column]]);
    this.text.replaceChildren(...this.nodes);
    this.node.hidden = false;
    this.later();
  }

  add(text, row) {
    const node = element("span", { class: "token" }, visible(text));
    if (this.rows.length === 0) node.tabIndex = 0;
    this.texts.push(text);
    this.rows.push(row);
    this.nodes.push(node);
    this.text.append(node);
    this.later();
  }

  end(took) {
    this.isWhole = true;
    this.took = took;
    this.later();
  }

  fail(message) {
    this.what.textContent = message;
    this.what.classList.add("bad");
    this.node.hidden = false;
    this.isFailed = true;
  }

  point(n) {
    if (n === this.pointed) return;
    this.pointed = n;
    this.later();
  }

  // Shows the generated token *n*, or all of them.
  choose(n) {
    const node = (at) => this.nodes[this.nPrompt + at];
    if (this.chosen !== undefined) node(this.chosen)?.classList.remove("chosen");
    this.chosen = n >= 0 ? n : undefined;
    if (this.chosen !== undefined) node(this.chosen)?.classList.add("chosen");
    this.later();
  }

  later() {
    this.drawing ??= requestAnimationFrame(() => {
      this.drawing = undefined;
      this.draw();
    });
  }

  draw() {
    if (this.rows.length === 0) return;
    const n = this.pointed ?? this.chosen;
    const rows = n === undefined ? this.rows : [this.rows[n]];
    if (this.choice.offer(rows[0])) this.onchange();
    const weights = mean(rows, this.layer, this.head);
    colourAndList(this, weights, (column) => quoted(this.texts[column]));
    this.tell(n);
    this.drawGrid(rows);
  }

  tell(n) {
    this.what.classList.remove("bad");
    const { length } = this.rows;
    const text = n === undefined ? undefined : this.texts[this.nPrompt + n];
    const more = n === undefined ? count(length, "token") : `token ${n + 1} of ${length}`;
    const took = n === undefined && this.isWhole ? `, ${this.took}` : "";
    this.slider.max = length;
    this.slider.value = n === undefined ? 0 : n + 1;
    this.slider.setAttribute("aria-valuetext", text === undefined ? "all" : `${more}: ${text}`);
    const title = text === undefined ? "What all tokens looked at" : `What ${quoted(text)} looked at`;
    this.what.replaceChildren(html`<strong>${title}</strong><span class="note">${more + took}</span>`);
  }

  // A strip for each head: what it looked at, from the first column to the last.
  drawGrid(rows) {
    const { nLayers, nHeads } = this.choice;
    const { grid } = this;
    const ratio = devicePixelRatio;
    const width = grid.clientWidth;
    const height = nLayers * (CELL.height + CELL.gap);
    grid.style.setProperty("height", `${height}px`);
    grid.width = width * ratio;
    grid.height = height * ratio;
    const pen = grid.getContext("2d");
    pen.scale(ratio, ratio);
    const style = getComputedStyle(grid);
    const cell = width / nHeads;
    const isChosen = (l, h) => (this.layer ?? l) === l && (this.head ?? h) === h;
    const isNarrowed = this.layer !== undefined || this.head !== undefined;
    for (let l = 0; l < nLayers; l++) {
      for (let h = 0; h < nHeads; h++) {
        const [x, y, w] = [h * cell, l * (CELL.height + CELL.gap), cell - CELL.gap];
        const weights = this.choice.shown(mean(rows, l, h));
        const most = weights.reduce((a, b) => Math.max(a, b), 0);
        pen.globalAlpha = 1;
        pen.fillStyle = style.borderTopColor;
        pen.fillRect(x, y, w, CELL.height);
        pen.fillStyle = style.color;
        const step = w / weights.length;
        heats(weights, most).forEach((heat, i) => {
          if (heat === 0) return;
          pen.globalAlpha = heat / 10;
          pen.fillRect(x + i * step, y, Math.max(step, 0.5), CELL.height);
        });
        if (!isNarrowed || !isChosen(l, h)) continue;
        pen.globalAlpha = 1;
        pen.strokeStyle = style.outlineColor;
        pen.lineWidth = 2;
        pen.strokeRect(x + 1, y + 1, w - 2, CELL.height - 2);
      }
    }
    const shape = `${count(nLayers, "layer")} from top to bottom, ${count(nHeads, "head")} from left to right`;
    grid.setAttribute("aria-label", shape);
    this.gridNote.textContent = `${shape}. A strip is the text from its first token to its last; click one to see its head.`;
  }
}

// The mean of *rows*, whose columns grow by one from each to the next.
function mean(rows, layer, head) {
  const sum = new Float32Array(rows.at(-1).nColumns);
  for (const row of rows) row.mean(layer, head, sum);
  return sum.map((value) => value / rows.length);
}

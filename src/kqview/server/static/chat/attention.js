// The panel of attention: the prompt as the model saw it, coloured by what the answer, or one token
// of it, looked at. A token is chosen by pointing at it, with the keyboard in the answer, or with
// the slider.

import { Coloured, RowChoice, colourAndList, visible } from "../coloured.js";
import { element, field, html, quoted } from "../dom.js";
import { heats } from "../rows.js";
import { Looked } from "./looked.js";

export class Attention {
  constructor() {
    this.columns = []; // elements of the prompt's tokens
    this.isMark = []; // of each, whether it is the template's
    this.texts = [];
    this.coloured = new Coloured((column) => this.nodesOf(column));
    this.choice = new RowChoice(() => this.mix());
    this.what = html`<p class="what"></p>`;
    this.prompt = html`<div class="prompt" tabindex="0" role="region" aria-label="Prompt as the model saw it">
    </div>`;
    this.listed = html`<ol class="bars"></ol>`;
    this.marks = html`<input type="checkbox" @change=${() => this.later()}>`;
    this.heads = html`<div class="heads" role="img" aria-label="Grid of heads, layer by layer"
      @click=${({ target }) => target.head && this.choice.choose(...target.head)}></div>`;
    this.slider = html`<input type="range" min="0" max="0" value="0"
      @input=${() => this.choose(this.looked.marks[this.slider.value - 1])}>`;
    this.legend = html`<span class="legend note" aria-hidden="true"></span>`;
    this.body = html`<div hidden>
      ${this.what}
      ${field("Token of the answer", this.slider)}
      <div class="over"><h3>Prompt</h3>${this.legend}</div>
      ${this.prompt}
      ${this.choice.nodes}
      <label class="inline">${this.marks}Leave out the template's marks</label>
      <h3>Heads</h3>
      <p class="note">A row for each layer: the largest share that each head gives to one token.</p>
      ${this.heads}
      <h3>Looked at most</h3>
      ${this.listed}
    </div>`;
    this.empty = html`<p class="note">
      While this panel is open, answers come with their attention. Send a message to see which
      tokens of the prompt they look at.
    </p>`;
    this.node = html`<div class="attention">${this.empty}${this.body}</div>`;
  }

  // Begins with the answer of a request.
  begin(requestId) {
    const looked = new Looked(requestId, () => looked === this.looked && this.later());
    this.open(looked);
    return looked;
  }

  async open(looked) {
    if (looked === this.looked) return;
    this.clear();
    this.looked = looked;
    this.empty.hidden = true;
    this.body.hidden = false;
    this.prompt.replaceChildren();
    this.columns = [];
    this.later();
    try {
      const texts = await looked.prompt();
      if (looked !== this.looked) return;
      this.texts = texts;
      this.isMark = marksIn(texts);
      this.columns = texts.map((text) => element("span", { class: kindOf(text) }, visible(text)));
      this.prompt.replaceChildren(...this.columns);
      this.coloured.clear();
      this.later();
    } catch (error) {
      looked.failed ??= error;
      this.later();
    }
  }

  close() {
    this.clear();
    this.looked = undefined;
    this.body.hidden = true;
    this.empty.hidden = false;
  }

  clear() {
    this.coloured.clear();
    this.chosen?.nodes.forEach((node) => node.classList.remove("chosen"));
    this.chosen = this.pointed = undefined;
    this.listed.replaceChildren();
    this.texts = [];
  }

  // Shows *mark*, undefined for the whole answer, for as long as it is pointed at.
  point(mark) {
    if (mark === this.pointed) return;
    if (mark && mark.looked !== this.looked) this.open(mark.looked);
    this.pointed = mark;
    this.later();
  }

  // Shows *mark* until another one is chosen; undefined for the whole answer.
  choose(mark) {
    if (mark && mark.looked !== this.looked) this.open(mark.looked);
    this.chosen?.nodes.forEach((node) => node.classList.remove("chosen"));
    this.chosen = mark;
    mark?.nodes.forEach((node) => node.classList.add("chosen"));
    mark?.nodes[0]?.scrollIntoView({ block: "nearest" });
    this.later();
  }

  mix() {
    this.looked?.show(this.choice.layer, this.choice.head);
    this.later();
  }

  later() {
    this.drawing ??= requestAnimationFrame(() => {
      this.drawing = undefined;
      if (this.looked) this.draw();
    });
  }

  async draw() {
    const { looked } = this;
    const mark = this.pointed ?? this.chosen;
    this.tell(mark);
    let weights, peaks;
    if (mark) {
      try {
        const row = await looked.row(mark);
        if (looked !== this.looked || mark !== (this.pointed ?? this.chosen)) return;
        if (this.choice.offer(row)) this.mix();
        weights = row.mean(looked.layer, looked.head);
        peaks = row.peaks();
      } catch (error) {
        this.what.textContent = error.message;
        weights = new Float32Array(0);
      }
    } else {
      const some = looked.rows.values().next().value;
      if (some?.nLayers && this.choice.offer(some)) this.mix();
      weights = looked.mean();
      peaks = looked.peaks();
    }
    if (peaks) this.drawHeads(peaks);
    if (this.marks.checked) weights = weights.map((one, i) => (this.isMark[i] ? 0 : one));
    colourAndList(this, weights, (column) => this.nameOf(column));
  }

  // Colours the grid of heads by *peaks*.
  drawHeads(peaks) {
    const { nLayers = 0, nHeads = 0, layer, head } = this.choice;
    if (this.heads.childElementCount !== nLayers * nHeads) {
      this.heads.style.setProperty("--n", nHeads);
      const cells = Array.from({ length: nLayers * nHeads }, () => element("span"));
      this.heads.replaceChildren(...cells);
    }
    const shown = heats(peaks, 1);
    [...this.heads.children].forEach((cell, i) => {
      const [l, h] = (cell.head = [Math.floor(i / nHeads), i % nHeads]);
      const isChosen = l === layer && h === head;
      cell.className = `heat${shown[i] ?? 0}${isChosen ? " chosen" : ""}`;
      cell.title = `Layer ${l}, head ${h}: ${Math.round(100 * (peaks[i] ?? 0))} %`;
    });
  }

  // Says what is shown, and keeps the slider at it.
  tell(mark) {
    const { looked } = this;
    const n = looked.marks.length;
    this.slider.max = n;
    const at = mark ? looked.marks.indexOf(mark) + 1 : 0;
    this.slider.value = at;
    const title = mark ? `What ${quoted(mark.text)} looked at` : "What the whole answer looked at";
    this.slider.setAttribute("aria-valuetext", mark ? `${at} of ${n}: ${mark.text}` : "whole answer");
    let more = "";
    if (mark) more = `token ${at} of ${n}`;
    else if (looked.failed) more = looked.failed.message;
    else if (looked.counted.size < n) more = `mean of ${looked.counted.size} of ${n} tokens`;
    else if (n > 0) more = `mean of ${n} tokens`;
    this.what.replaceChildren(html`<strong>${title}</strong><span class="note">${more}</span>`);
  }

  // Elements of the token at *column*, of the prompt or of the answer.
  nodesOf(column) {
    const { nPrompt, byIndex } = this.looked;
    if (column >= nPrompt) return byIndex.get(column - nPrompt)?.nodes;
    return this.columns[column] && [this.columns[column]];
  }

  nameOf(column) {
    const { nPrompt, byIndex } = this.looked;
    const text = column < nPrompt ? this.texts[column] : byIndex.get(column - nPrompt)?.text;
    return text === undefined ? `token ${column}` : quoted(text);
  }
}

const ROLE = /^(system|developer|user|assistant|model|tool)?\n+$/;
const N_ROLE = 8; // tokens of a role, at most

// Which tokens are marks of the template: special ones, and a role behind one with its line end.
function marksIn(texts) {
  const found = texts.map((text) => kindOf(text) !== "token");
  texts.forEach((_, i) => {
    if (!found[i]) return;
    for (let end = i + 2; end <= i + 1 + N_ROLE; end++) {
      if (ROLE.test(texts.slice(i + 1, end).join(""))) found.fill(true, i, end);
    }
  });
  return found;
}

const kindOf = (text) => (/^<[|｜].*[|｜]>$/.test(text) ? "token special" : "token");

// The panel of attention: the prompt as the model saw it, coloured by what the answer, or one token
// of it, looked at. A token is chosen by pointing at it, by the keyboard in the answer, or with the
// slider.

import { choice, element, field, quoted } from "../dom.js";
import { heats, largest } from "../rows.js";
import { Looked } from "./looked.js";

const N_LISTED = 8;

export class Attention {
  constructor() {
    this.painted = []; // {nodes, heat} of each column
    this.columns = []; // elements of the prompt's tokens
    this.texts = [];
    this.what = element("p", { class: "what" });
    this.prompt = element("div", {
      class: "prompt",
      tabindex: 0,
      role: "region",
      "aria-label": "Prompt as the model saw it",
    });
    this.listed = element("ol", { class: "bars" });
    this.layer = choice([["", "Mean of all"]], () => this.mix());
    this.head = choice([["", "Mean of all"]], () => this.mix());
    this.first = element("input", { type: "checkbox", checked: true, onchange: () => this.draw() });
    this.slider = element("input", {
      type: "range",
      min: 0,
      max: 0,
      value: 0,
      oninput: () => this.choose(this.looked.marks[this.slider.value - 1]),
    });
    this.scale = element("span", { class: "legend note", "aria-hidden": "true" });
    this.body = element(
      "div",
      { hidden: true },
      this.what,
      field("Token of the answer", this.slider),
      element("div", { class: "over" }, element("h3", {}, "Prompt"), this.scale),
      this.prompt,
      element("div", { class: "bar" }, field("Layer", this.layer), field("Head", this.head)),
      element("label", { class: "inline" }, this.first, "Leave out the first token"),
      element("h3", {}, "Looked at most"),
      this.listed,
    );
    this.empty = element(
      "p",
      { class: "note" },
      "While this panel is open, answers come with their attention. Send a message to see which ",
      "tokens of the prompt they look at.",
    );
    this.node = element("div", { class: "attention" }, this.empty, this.body);
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
    this.sizes = undefined;
    this.later();
    try {
      const texts = await looked.prompt();
      if (looked !== this.looked) return;
      this.texts = texts;
      this.columns = texts.map((text) => element("span", { class: kindOf(text) }, visible(text)));
      this.prompt.replaceChildren(...this.columns);
      this.unpaint();
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

  unpaint() {
    for (const { nodes, heat } of this.painted) if (nodes) paint(nodes, heat, 0);
    this.painted = [];
  }

  clear() {
    this.unpaint();
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
    const number = ({ value }) => (value === "" ? undefined : Number(value));
    this.looked?.show(number(this.layer), number(this.head));
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
    let weights;
    if (mark) {
      try {
        const row = await looked.row(mark);
        if (looked !== this.looked || mark !== (this.pointed ?? this.chosen)) return;
        this.offer(row);
        weights = row.mean(looked.layer, looked.head);
      } catch (error) {
        this.what.textContent = error.message;
        weights = new Float32Array(0);
      }
    } else {
      const some = looked.rows.values().next().value;
      if (some?.nLayers) this.offer(some);
      weights = looked.mean();
    }
    const shown = weights.slice();
    if (this.first.checked) shown[0] = 0;
    const top = largest(shown, N_LISTED);
    const most = top[0]?.[1] ?? 0;
    this.colour(heats(shown, most));
    this.scale.replaceChildren(
      ...(most > 0 ? ["0", element("span", { class: "scale" }), percent(most)] : []),
    );
    this.listed.replaceChildren(...top.map(([column, weight]) => this.bar(column, weight, most)));
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
    this.what.replaceChildren(
      element("strong", {}, title),
      element("span", { class: "note" }, more),
    );
  }

  // Offers the layers and heads that rows have.
  offer({ nLayers, nHeads }) {
    if (this.sizes === `${nLayers} ${nHeads}`) return;
    this.sizes = `${nLayers} ${nHeads}`;
    for (const [select, n] of [
      [this.layer, nLayers],
      [this.head, nHeads],
    ]) {
      const before = select.value;
      const names = Array.from({ length: n > 1 ? n : 0 }, (_, i) => [i, String(i)]);
      select.replaceChildren(
        ...[["", "Mean of all"], ...names].map(([value, title]) => element("option", { value }, title)),
      );
      select.value = Number(before) < n ? before : "";
      select.disabled = n < 2;
    }
    this.mix();
  }

  colour(levels) {
    const { looked } = this;
    const n = Math.max(levels.length, this.painted.length);
    for (let i = 0; i < n; i++) {
      const heat = levels[i] ?? 0;
      const one = (this.painted[i] ??= { nodes: undefined, heat: 0 });
      one.nodes ??=
        i < looked.nPrompt
          ? this.columns[i] && [this.columns[i]]
          : looked.byIndex.get(i - looked.nPrompt)?.nodes;
      if (one.heat === heat || !one.nodes) continue;
      paint(one.nodes, one.heat, heat);
      one.heat = heat;
    }
  }

  bar(column, weight, most) {
    const { looked } = this;
    const text =
      column < looked.nPrompt
        ? this.texts[column]
        : looked.byIndex.get(column - looked.nPrompt)?.text;
    const row = element(
      "li",
      {},
      element("span", { class: "name" }, text === undefined ? `token ${column}` : quoted(text)),
      element("span", { class: "value" }, percent(weight)),
    );
    row.style.setProperty("--part", `${(100 * weight) / most}%`);
    return row;
  }
}

function paint(nodes, before, after) {
  for (const { classList } of nodes) {
    if (before) classList.remove(`heat${before}`);
    if (after) classList.add(`heat${after}`);
  }
}

function percent(weight) {
  const value = 100 * weight;
  return `${value < 10 ? value.toFixed(1) : Math.round(value)} %`;
}

// Line ends as signs, so that every token has something to colour.
const visible = (text) => text.replace(/\n/g, "↵\n") || "·";

const kindOf = (text) => (/^<[|｜].*[|｜]>$/.test(text) ? "token special" : "token");

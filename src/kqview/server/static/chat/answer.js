// One answer as it arrives: reasoning to unfold, the text, what its sentences are from, and what it
// cost. It is drawn once per
// animation frame, however many tokens arrived in between.

import { count, element, html, milliseconds } from "../dom.js";
import { Writer } from "./writer.js";

export class Answer {
  // onmark is told each token that has attention: {channel, text, path, index, nodes}, where *path*
  // is that of its row and *index* its place among all generated tokens.
  constructor({ onmark = () => {} } = {}) {
    this.marks = [];
    this.onmark = onmark;
    this.waiting = []; // pieces that are not drawn
    this.body = html`<div class="text"></div>`;
    this.state = html`<p class="state note"></p>`;
    this.reasoning = html`<div class="text"></div>`;
    this.summary = html`<summary>Reasoning</summary>`;
    this.fold = html`<details class="reasoning" hidden>${this.summary}${this.reasoning}</details>`;
    this.usage = html`<p class="usage note" hidden></p>`;
    this.foot = html`<div class="foot"></div>`;
    this.node = html`<article class="turn answer" aria-label="Answer">
      ${this.fold}${this.body}${this.state}${this.usage}${this.foot}
    </article>`;
    this.writers = {
      token: new Writer(this.body, (mark) => this.tokenNode(mark)),
      analysis: new Writer(this.reasoning, (mark) => this.tokenNode(mark)),
    };
  }

  get text() {
    return this.writers.token.text;
  }

  // What it waits for: a text and, where it is known, how much of it is done.
  wait(text, progress) {
    const bar =
      progress === undefined
        ? html`<span class="pulse" aria-hidden="true"></span>`
        : html`<progress max="1" value=${progress} aria-label=${text}></progress>`;
    this.state.replaceChildren(bar, text);
    this.state.hidden = false;
  }

  // A frame "token" or "analysis".
  write(channel, { text, attention }) {
    const mark = attention && { channel, text, path: attention, index: indexOf(attention), nodes: [] };
    if (mark) this.marks.push(mark);
    this.later(channel, text, mark);
  }

  // An element behind what was written of the answer.
  append(node) {
    this.later("token", node);
  }

  later(...piece) {
    if (this.waiting.length === 0) this.drawing = requestAnimationFrame(() => this.draw());
    this.waiting.push(piece);
  }

  draw() {
    cancelAnimationFrame(this.drawing);
    if (this.waiting.length === 0) return;
    this.state.hidden = true;
    for (const [channel, text, mark] of this.waiting) {
      if (channel === "analysis" && this.fold.hidden) {
        this.fold.hidden = false;
        this.summary.textContent = "Reasoning …";
      }
      if (text instanceof Node) this.writers[channel].append(text);
      else this.writers[channel].write(text, mark);
      if (mark) this.onmark(mark);
    }
    this.waiting = [];
    this.ondraw?.();
  }

  // A frame "reasoning": all of it at once, for servers that do not stream it.
  reason(text) {
    this.draw();
    if (this.writers.analysis.text) return;
    this.fold.hidden = false;
    this.writers.analysis.write(text);
  }

  // An element for a piece of a token; a token with a line end has several.
  tokenNode(mark) {
    const node = element("span", { class: "token" });
    node.mark = mark;
    mark.nodes.push(node);
    return node;
  }

  // Nothing follows. *usage* is the data of that frame, *status* how it ended.
  end(usage, status) {
    this.draw();
    for (const writer of Object.values(this.writers)) writer.end();
    this.state.hidden = true;
    this.summary.textContent = "Reasoning";
    const parts = usage ? usageParts(usage) : [];
    if (status) parts.push(status);
    if (usage?.reasoning_tokens) {
      this.summary.textContent = `Reasoning, ${count(usage.reasoning_tokens, "token")}`;
    }
    this.usage.replaceChildren(...parts.map((part) => html`<span>${part}</span>`));
    this.usage.hidden = parts.length === 0;
  }
}

const indexOf = (path) => Number(path.slice(path.lastIndexOf("/") + 1));

function usageParts(usage) {
  if (usage.output_tokens === 0) return [];
  const parts = [
    count(usage.output_tokens, "token"),
    `${usage.decode_tps.toFixed(usage.decode_tps < 10 ? 1 : 0)} tokens/s`,
    count(usage.prompt_tokens, "prompt token"),
    milliseconds(usage.latency_ms),
  ];
  if (usage.reasoning_ratio) parts.push(`${Math.round(100 * usage.reasoning_ratio)} % reasoning`);
  return parts;
}

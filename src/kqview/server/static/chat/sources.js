// The panel of sources: texts that the next messages are about, and which passage of them each
// sentence of an answer is from.

import { button, element, html, quietButton } from "../dom.js";
import { icon } from "./icons.js";

const TITLE_CHARACTERS = 40;

export class Sources {
  constructor() {
    this.all = []; // {title, text}
    this.text = html`<textarea rows="4" placeholder="Paste a text"></textarea>`;
    this.files = html`<input type="file" multiple accept="text/*,.md" @change=${() => this.read()}>`;
    this.list = html`<ol class="sources"></ol>`;
    this.what = html`<p class="what note" role="status"></p>`;
    this.shown = html`<div class="prompt" tabindex="0" role="region" aria-label="Source" hidden></div>`;
    this.node = html`<div class="attention">
      <p class="note">
        The model reads these texts with each message, and the answer says which passage each of its
        sentences looked at most. The attention of the answer is not kept then.
      </p>
      <label>Text${this.text}</label>
      <div class="bar">${button("Add", () => this.addText())}<label>Files${this.files}</label></div>
      ${this.list}
      ${this.what}
      ${this.shown}
    </div>`;
  }

  // As field of a request; undefined without sources.
  get documents() {
    return this.all.length > 0 ? this.all : undefined;
  }

  addText() {
    this.add(this.text.value);
    this.text.value = "";
  }

  async read() {
    for (const file of this.files.files) this.add(await file.text(), file.name);
    this.files.value = "";
  }

  add(text, title = text.trim().split("\n")[0].slice(0, TITLE_CHARACTERS)) {
    if (text.trim()) this.all = [...this.all, { title, text }];
    this.draw();
  }

  remove(one) {
    this.all = this.all.filter((other) => other !== one);
    this.draw();
  }

  draw() {
    const row = (one) => html`<li>
      ${quietButton(one.title, () => this.show(one), { class: "quiet name" })}
      ${quietButton(icon("trash"), () => this.remove(one), { "aria-label": `Remove ${one.title}` })}
    </li>`;
    this.list.replaceChildren(...this.all.map(row));
  }

  // Shows a source, and in it the passage that a sentence is from: whole characters, of which some
  // are two units of a string.
  show({ title, text }, start = 0, stop = 0, what = title) {
    const characters = [...text];
    const part = (from, to) => characters.slice(from, to).join("");
    const passage = element("mark", {}, part(start, stop));
    this.shown.hidden = false;
    this.what.textContent = what;
    this.shown.replaceChildren(part(0, start), passage, part(stop));
    if (stop > start) passage.scrollIntoView({ block: "nearest" });
  }

  // The sign behind a sentence that is from one of *documents*, as a frame "citation" tells;
  // onopen is called before its passage is shown.
  sign(documents, cited, onopen) {
    const from = documents[cited.document_index];
    const what = `Source ${cited.document_index + 1}: ${cited.title}`;
    const show = () => {
      onopen();
      this.show(from, cited.start_char_index, cited.end_char_index, what);
    };
    const share = `${Math.round(100 * cited.score)} % of the attention`;
    const title = `${what}\n${cited.cited_text}\n${share}`;
    const label = { class: "cite", title, "aria-label": `${what}, ${share}` };
    return button(cited.document_index + 1, show, label);
  }
}

// Parts that several views of the page have.

import { bars, choice, facts, html, quoted } from "./dom.js";

// A paragraph of small print.
export const remark = (...text) => html`<p class="note">${text}</p>`;

// A token's text in quotes, or its id.
export const named = ({ text, id }) => (text === undefined ? `⟨${id}⟩` : quoted(text));

export const badge = (text, kind) => html`<span class=${kind ? `badge ${kind}` : "badge"}>${text}</span>`;

export const figure = (title, ...content) =>
  html`<figure><figcaption>${title}</figcaption>${content}</figure>`;

export const factList = (rows, kind) => html`<dl class=${kind}>${facts(rows)}</dl>`;

// *text* behind a *title* that opens it.
export const disclosure = (title, text, kind) =>
  html`<details class=${kind}><summary>${title}</summary><pre tabindex="0">${text}</pre></details>`;

export const barList = (rows, most) => html`<ol class="bars">${bars(rows, most)}</ol>`;

// [value, title] of each of *values*, and of none of them.
export const anyOf = (values) => [["", "Any"], ...values.map((value) => [value, value])];

export const anyChoice = (values, onchange) => choice(anyOf(values), onchange);

// Parts that several views of the page have.

import { client } from "./api.js";
import { bars, button, choice, facts, field, html, quoted } from "./dom.js";

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

// Draws the view that the address names anew.
export const reload = () => dispatchEvent(new Event("hashchange"));

// What went wrong, with what the user can do about it: try again, or give a key.
export function problem(error, again) {
  if (error.status === 401) return keyForm("This receiver shows traces to whoever has a key.");
  if (error.needsKey) return keyForm(error.message);
  return html`<div role="alert" class="problem">
    <p class="bad">${error.message}</p>
    ${button("Try again", again)}
  </div>`;
}

// Asks for the key; the view then begins anew with it.
export function keyForm(message) {
  const input = html`<input type="password" autocomplete="off" required>`;
  const submit = (event) => {
    event.preventDefault();
    client.key = input.value;
    reload();
  };
  return html`<form class="problem" @submit=${submit}>
    <p role="alert">${message}</p>
    <div class="bar filters">${field("API key", input)}<button>Read traces</button></div>
  </form>`;
}

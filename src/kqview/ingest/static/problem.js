// What went wrong, with what the user can do about it: try again, or give a key.

import { client } from "./api.js";
import { button, field, html } from "./dom.js";

// Draws the view that the address names anew.
export const reload = () => dispatchEvent(new Event("hashchange"));

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

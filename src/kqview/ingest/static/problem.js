// What went wrong, with what the user can do about it: try again, or give a key.

import { KeyNeeded, key } from "./api.js";
import { button, element, field } from "./dom.js";

// Draws the view that the address names anew.
export const reload = () => dispatchEvent(new Event("hashchange"));

export function problem(error, again) {
  if (error instanceof KeyNeeded) return keyForm(error.message);
  return element(
    "div",
    { role: "alert", class: "problem" },
    element("p", { class: "bad" }, error.message),
    button("Try again", again),
  );
}

// Asks for the key; the view then begins anew with it.
export function keyForm(message) {
  const input = element("input", { type: "password", autocomplete: "off", required: true });
  const submit = (event) => {
    event.preventDefault();
    key.set(input.value);
    reload();
  };
  return element(
    "form",
    { class: "problem", onsubmit: submit },
    element("p", { role: "alert" }, message),
    element(
      "div",
      { class: "bar filters" },
      field("API key", input),
      element("button", {}, "Read traces"),
    ),
  );
}

// What went wrong, with what the user can do about it: try again, or give a key.

import { KeyNeeded, key } from "./api.js";
import { element } from "./dom.js";

export function problem(error, again) {
  if (error instanceof KeyNeeded) return keyForm(error, again);
  return element("div", { role: "alert", class: "problem" },
    element("p", { class: "bad" }, error.message),
    element("button", { onclick: again }, "Try again"));
}

function keyForm(error, again) {
  const input = element("input", { type: "password", autocomplete: "off", required: true });
  const submit = (event) => {
    event.preventDefault();
    key.set(input.value);
    again();
  };
  return element("form", { class: "problem", onsubmit: submit },
    element("p", { role: "alert" }, error.message),
    element("label", {}, "API key ", input),
    element("button", {}, "Read traces"));
}

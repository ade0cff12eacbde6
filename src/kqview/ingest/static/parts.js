// Parts that several views of the page have.

import { choice, element, quoted } from "./dom.js";

// A paragraph of small print.
export const remark = (...text) => element("p", { class: "note" }, ...text);

// A token's text in quotes, or its id.
export const named = ({ text, id }) => (text === undefined ? `⟨${id}⟩` : quoted(text));

export const badge = (text, kind) =>
  element("span", { class: kind ? `badge ${kind}` : "badge" }, text);

export const figure = (title, ...content) =>
  element("figure", {}, element("figcaption", {}, title), ...content);

// [name, value, class of the value] as a list of definitions.
export function factList(facts, attributes = {}) {
  return element(
    "dl",
    attributes,
    facts.map(([name, value, kind]) =>
      element("div", {}, element("dt", {}, name), element("dd", { class: kind }, value)),
    ),
  );
}

// *text* behind a *title* that opens it.
export function disclosure(title, text, attributes = {}) {
  return element(
    "details",
    attributes,
    element("summary", {}, ...[title].flat()),
    element("pre", { tabindex: 0 }, text),
  );
}

// [name, size, shown value, note] as bars, as long as their part of *most*.
export function bars(rows, most) {
  return element(
    "ol",
    { class: "bars" },
    rows.map(([name, size, shown, note]) => {
      const row = element(
        "li",
        {},
        element("span", { class: "name" }, name),
        note,
        element("span", { class: "value" }, shown),
      );
      row.style.setProperty("--part", `${(100 * size) / (most || 1)}%`);
      return row;
    }),
  );
}

const anyOf = (values) => [["", "Any"], ...values.map((value) => [value, value])];

// A select of *values*, or of none of them.
export const anyChoice = (values, onchange) => choice(anyOf(values), onchange);

// Offers other *values*, and keeps what is chosen.
export function offer(select, values) {
  const chosen = select.value;
  select.replaceChildren(...anyChoice(values).children);
  select.value = values.includes(chosen) ? chosen : "";
}

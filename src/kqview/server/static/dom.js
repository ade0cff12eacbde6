// Elements made without HTML: all text goes in as text, so nothing that a trace holds is markup.

// element("button", {class: "small", onclick: f, "aria-label": "Play"}, "Play", anotherElement)
export function element(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

export function svg(name, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function fill(made, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else made.setAttribute(key, value === true ? "" : value);
  }
  made.append(
    ...children
      .flat()
      .filter((child) => child !== undefined && child !== null && child !== false && child !== ""),
  );
  return made;
}

export const note = (...children) => element("span", { class: "note" }, ...children);
export const field = (label, input) => element("label", {}, label, input);
export const button = (title, onclick, attributes = {}) =>
  element("button", { onclick, ...attributes }, title);
export const quietButton = (title, onclick, attributes = {}) =>
  button(title, onclick, { class: "quiet", ...attributes });

// A select of [value, title] pairs.
export function choice(pairs, onchange) {
  return element(
    "select",
    { onchange },
    pairs.map(([value, title]) => element("option", { value }, title)),
  );
}

// A text whose spaces and control characters can be seen, in quotation marks.
export function quoted(text) {
  return JSON.stringify(text).replace(
    /[\u007f-\u009f\u2028\u2029\ufeff\u200b-\u200f\u202a-\u202e]/g,
    (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`,
  );
}

export function count(n, one, many = `${one}s`) {
  return `${n.toLocaleString("en")} ${n === 1 ? one : many}`;
}

export function milliseconds(ms) {
  if (ms === undefined || ms === null || Number.isNaN(ms)) return "–";
  if (ms >= 1000) return `${(ms / 1000).toFixed(2)} s`;
  return `${ms >= 100 ? ms.toFixed(0) : ms >= 1 ? ms.toFixed(1) : ms.toFixed(2)} ms`;
}

export function share(value) {
  if (value === undefined) return "–";
  return value > 0 && value < 0.001 ? value.toExponential(1) : value.toFixed(3);
}

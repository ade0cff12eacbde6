// Elements from HTML that stands in the page's scripts. What is put into it is never markup,
// whatever a trace or a model says.

const templates = new WeakMap(); // by the constant parts of a literal

// The element of html`<p class=${kind}>${text}</p>`, or a fragment if there are several nodes.
// Between tags go texts, nodes and lists of them; behind "name=" the value of an attribute, which
// undefined, null and false leave out and true leaves empty; behind "@event=" a listener.
export function html(strings, ...values) {
  if (!templates.has(strings)) templates.set(strings, parsed(strings));
  const { content, names } = templates.get(strings);
  const made = document.importNode(content, true);
  const walker = document.createTreeWalker(made, NodeFilter.SHOW_ELEMENT | NodeFilter.SHOW_COMMENT);
  const nodes = [];
  while (walker.nextNode()) nodes.push(walker.currentNode);
  for (const node of nodes) {
    if (node.nodeType === Node.COMMENT_NODE) node.replaceWith(...shown([values[node.data]]));
    for (const { name } of [...(node.attributes ?? [])]) {
      if (!name.startsWith("§")) continue;
      node.removeAttribute(name);
      set(node, names[name.slice(1)], values[name.slice(1)]);
    }
  }
  return made.childNodes.length === 1 ? made.firstChild : made;
}

// The literal's HTML, without the ends of lines between tags. An attribute "§N" or a comment "N"
// is where value N goes; `names` has the attributes' real names, which a parser would look into.
function parsed(strings) {
  const names = [];
  const text = strings.reduce((before, after, i) => {
    const name = /<[^<>]*\s(\S+)=$/.exec(before)?.[1];
    names.push(name);
    return (name ? `${before.slice(0, -name.length - 1)}§${i - 1}` : `${before}<!--${i - 1}-->`) + after;
  });
  const template = document.createElement("template");
  template.innerHTML = text.replace(/(>)\s*\n\s*|\s*\n\s*(?=<)/g, "$1");
  return { content: template.content, names };
}

function set(node, name, value) {
  if (value === undefined || value === null || value === false) return;
  if (name.startsWith("@")) node.addEventListener(name.slice(1), value);
  else node.setAttribute(name, value === true ? "" : value);
}

const shown = (children) => children.flat(Infinity).filter((child) => child || child === 0);

// A single element, such as one of thousands of tokens: element("span", { class: "token" }, text).
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) set(made, key, value);
  made.append(...shown(children));
  return made;
}

export const note = (...children) => html`<span class="note">${children}</span>`;
export const field = (label, input) => html`<label>${label}${input}</label>`;
export const button = (title, onclick, attributes = {}) =>
  element("button", { "@click": onclick, ...attributes }, title);
export const quietButton = (title, onclick, attributes = {}) =>
  button(title, onclick, { class: "quiet", ...attributes });

// A select of [value, title] pairs.
export const choice = (pairs, onchange) =>
  html`<select @change=${onchange}>${pairs.map(([value, title]) => option(value, title))}</select>`;
const option = (value, title) => html`<option value=${value}>${title}</option>`;

// Offers other [value, title] pairs, and keeps what is chosen if it is among them, else the first.
export function offer(select, pairs, chosen = select.value) {
  select.replaceChildren(...pairs.map(([value, title]) => option(value, title)));
  select.value = pairs.some(([value]) => String(value) === chosen) ? chosen : (pairs[0]?.[0] ?? "");
}

// [name, size, shown value, note] as items of a list of bars, as long as their part of *most*.
export function bars(rows, most) {
  return rows.map(([name, size, value, more]) => {
    const row = html`<li><span class="name">${name}</span>${more}<span class="value">${value}</span></li>`;
    row.style.setProperty("--part", `${(100 * size) / (most || 1)}%`);
    return row;
  });
}

// [name, value, class of the value] as divisions of a list of definitions.
export const facts = (rows) =>
  rows.map(([name, value, kind]) => html`<div><dt>${name}</dt><dd class=${kind}>${value}</dd></div>`);

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

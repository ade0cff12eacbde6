// Text of a model as elements: paragraphs, code between ``` fences, and within a line a heading,
// **bold** and `code`. Nothing else is markup, and all of it goes in as text. Writing costs the
// same however long the text is: only the last block changes, and those out of sight are not laid
// out.

import { element, html } from "../dom.js";

const OPENS = /^ {0,3}```[^`]*$/;
const CLOSES = /^ {0,3}```\s*$/;
const MAY_BE_FENCE = /^ {0,3}`{0,2}$/;
const HEADING = /^#{1,6} +(?=\S)/;
const INLINE = /(`+)([^`]+)\1|(\*\*)(?=\S)(.+?)\3/g;

export class Writer {
  // tokenNode(mark) makes the element of a piece that has a mark; other pieces are plain text.
  constructor(root, tokenNode) {
    this.root = root;
    this.tokenNode = tokenNode;
    this.text = "";
    this.isCode = false;
    this.block = undefined; // where pieces go
    this.nodes = []; // of the current line
    this.line = ""; // the current line while it may be a fence
    this.held = []; // its pieces
  }

  // Adds *text*, one token or several, with what the page knows of it.
  write(text, mark) {
    this.text += text;
    for (const piece of text.split(/(?<=\n)/)) this.add(piece, mark);
  }

  // Nothing follows: what was held back is text.
  end() {
    if (this.line !== undefined && !this.isFence(this.line)) this.release();
    this.endLine();
  }

  add(piece, mark) {
    const endsLine = piece.endsWith("\n");
    if (this.line === undefined) {
      this.put(piece, mark);
    } else {
      this.line += piece;
      this.held.push([piece, mark]);
      const line = endsLine ? this.line.slice(0, -1) : this.line;
      const isFence = this.isFence(line);
      if (isFence && endsLine) this.turn(line);
      else if (endsLine || !(isFence || MAY_BE_FENCE.test(line))) this.release();
    }
    if (endsLine) this.endLine();
  }

  // An element that is no part of the text, behind what was written.
  append(node) {
    if (this.line !== undefined && !this.isCode) this.release();
    (this.block ?? this.root).append(node);
    if (this.block) this.addNode(document.createTextNode("")); // text that follows goes behind it
  }

  isFence(line) {
    return (this.isCode ? CLOSES : OPENS).test(line);
  }

  // The line is text.
  release() {
    const isEmpty = this.line === "\n";
    this.line = undefined;
    if (isEmpty && !this.isCode) {
      this.block = undefined; // a paragraph ends; what is between two is their margin
      return;
    }
    for (const [piece, mark] of this.held) this.put(piece, mark);
    this.held = [];
  }

  endLine() {
    if (!this.isCode && this.nodes.length > 0) dress(this.nodes);
    this.nodes = [];
    this.held = [];
    this.line = "";
  }

  // A fence opens or closes a block of code.
  turn(line) {
    this.isCode = !this.isCode;
    this.block = undefined;
    if (!this.isCode) return;
    const language = line.trim().slice(3).trim();
    const title = language ? `Code: ${language}` : "Code";
    this.block = element("code");
    this.root.append(html`<pre tabindex="0" role="group" aria-label=${title}>${this.block}</pre>`);
  }

  put(piece, mark) {
    if (!this.block) {
      this.block = element("div", { class: "block" });
      this.root.append(this.block);
    }
    if (mark) {
      const node = this.tokenNode(mark);
      node.append(piece);
      this.addNode(node);
    } else if (this.nodes.at(-1)?.nodeType === Node.TEXT_NODE) {
      this.nodes.at(-1).appendData(piece);
    } else {
      this.addNode(document.createTextNode(piece));
    }
  }

  addNode(node) {
    this.block.append(node);
    this.nodes.push(node);
  }
}

// Makes markup of what a whole line says; *nodes* are its texts and tokens.
function dress(nodes) {
  const leaves = nodes.map((node) => (node.nodeType === Node.TEXT_NODE ? node : node.firstChild));
  const line = leaves.map(({ data }) => data).join("");
  const ranges = [];
  const heading = HEADING.exec(line);
  if (heading) ranges.push([0, heading[0].length, "sign"]);
  for (const found of line.matchAll(INLINE)) {
    const width = (found[1] ?? found[3]).length;
    const end = found.index + found[0].length;
    ranges.push(
      [found.index, found.index + width, "sign"],
      [found.index + width, end - width, found[1] ? "code" : "strong"],
      [end - width, end, "sign"],
    );
  }
  if (heading) {
    const whole = element("span", { class: "heading" });
    nodes[0].before(whole);
    whole.append(...nodes);
  }
  if (ranges.length > 0) wrap(leaves, ranges);
}

// Puts the texts within each range into an element of its kind. From the last one to the first, as
// splitting a text leaves its beginning where it is.
function wrap(leaves, ranges) {
  const starts = [];
  let n = 0;
  for (const { length } of leaves) {
    starts.push(n);
    n += length;
  }
  const lengths = leaves.map(({ length }) => length);
  for (const [from, to, kind] of ranges.reverse()) {
    for (let i = leaves.length - 1; i >= 0; i--) {
      const start = Math.max(from - starts[i], 0);
      const end = Math.min(to - starts[i], lengths[i]);
      if (start >= end) continue;
      let text = leaves[i];
      if (end < text.length) text.splitText(end);
      if (start > 0) text = text.splitText(start);
      const node = kind === "sign" ? element("span", { class: "sign" }) : element(kind);
      text.replaceWith(node);
      node.append(text);
    }
  }
}

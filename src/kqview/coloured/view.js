// Makes the views of attention in this page answer to pointer and keys; see html.py for their
// parts. A page may run this once for each view: a view that is live is left alone.
(() => {
  const N_LISTED = 8;
  const N_HEATS = 10;
  const MEAN = -1;

  function element(tag, attributes, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (value !== undefined) node.setAttribute(name, value);
    }
    node.append(...children);
    return node;
  }

  const bytesOf = (text) => Uint8Array.from(atob(text), (sign) => sign.charCodeAt(0));
  const percent = (share) => `${share < 0.1 ? (100 * share).toFixed(1) : Math.round(100 * share)} %`;
  const quoted = (text) => `“${text.trim().replace(/\s+/g, " ") || text}”`;
  const count = (n, what) => `${n.toLocaleString("en")} ${what}${n === 1 ? "" : "s"}`;

  // Shares of each row and plane, as encode.py has written them.
  class Rows {
    constructor(data) {
      const { nColumns, layers, nKept, values, positions } = data;
      this.nColumns = nColumns;
      this.nKept = nKept;
      this.nPlanes = layers.reduce((n, [, heads]) => n + 1 + heads.length, 1);
      this.values = bytesOf(values);
      this.positions = new Uint16Array(bytesOf(positions).buffer);
      let n = 0;
      this.starts = nColumns.map((width) => (n += width) - width);
    }

    get length() {
      return this.nColumns.length;
    }

    // Adds the shares of row *i* in *plane*, times *part*, to *sum*.
    add(sum, i, plane, part) {
      const { nPlanes, nKept, values, positions } = this;
      const width = this.nColumns[i];
      const n = nKept || width;
      const start = nKept ? (i * nPlanes + plane) * n : nPlanes * this.starts[i] + plane * n;
      for (let j = 0; j < n; j++) {
        const value = values[start + j];
        if (value > 0) sum[nKept ? positions[start + j] : j] += part * (value / 255) ** 2;
      }
    }
  }

  class View {
    constructor(host) {
      this.data = JSON.parse(host.querySelector("script").textContent);
      this.rows = new Rows(this.data);
      this.rowAt = new Map(this.data.at.map((at, i) => [at, i]));
      this.pinned = this.pointed = undefined; // tokens
      this.means = new Map(); // of all rows, by plane
      this.fill(host.attachShadow({ mode: "open" }));
      this.draw();
    }

    fill(root) {
      const { texts, nPrompt, title, notes } = this.data;
      this.tokens = texts.map((text) => element("span", { class: "token" }, text));
      for (const at of this.rowAt.keys()) {
        const node = this.tokens[at];
        if (!node) continue;
        node.setAttribute("role", "button");
        node.setAttribute("aria-pressed", "false");
        node.tabIndex = -1;
      }
      this.stop = this.tokens[this.data.at[0]];
      if (this.stop) this.stop.tabIndex = 0;
      const parts =
        nPrompt === null
          ? [["Text", 0, texts.length]]
          : [["Prompt", 0, nPrompt], ["Generated", nPrompt, texts.length]];
      const text = element("div", {});
      for (const [name, begin, end] of parts) {
        if (begin === end) continue;
        const tokens = this.tokens.slice(begin, end);
        const box = element("p", { class: "tokens", role: "group", "aria-label": name }, ...tokens);
        // A long text scrolls, which keys can do only in what has the focus.
        const onresize = () => box.toggleAttribute("tabindex", box.scrollHeight > box.clientHeight);
        new ResizeObserver(onresize).observe(box);
        text.append(element("p", { class: "part", "aria-hidden": "true" }, name), box);
      }
      this.listen(text);
      this.what = element("p", { class: "what", role: "status" });
      this.list = element("ol", {});
      root.append(
        element("style", {}, STYLE_OF_VIEW),
        ...(title ? [element("p", {}, element("strong", {}, title))] : []),
        element("div", { class: "bar" }, ...this.controls()),
        text,
        this.what,
        this.list,
        ...notes.map((note) => element("p", { class: "note" }, note)),
        element(
          "p",
          { class: "note" },
          "Point at a token, or move to it with the arrow keys, to see what it looked at. ",
          "A click or Enter holds it, Escape lets go.",
        ),
      );
    }

    controls() {
      const { layers, hasFirst } = this.data;
      const changed = () => this.draw();
      const choice = (name, onchange) => {
        const select = element("select", { onchange });
        return [select, element("label", {}, name, select)];
      };
      const [layer, layerLabel] = choice("Layer", () => {
        this.offerHeads();
        this.draw();
      });
      const [head, headLabel] = choice("Head", changed);
      [this.layer, this.head] = [layer, head];
      offer(layer, layers.map(([name]) => name));
      this.offerHeads();
      this.first = element("input", { type: "checkbox", onchange: changed });
      this.first.checked = hasFirst;
      const nodes = [];
      if (layers.length > 0) nodes.push(layerLabel);
      if (layers.some(([, heads]) => heads.length > 0)) nodes.push(headLabel);
      if (hasFirst) nodes.push(element("label", {}, this.first, "Leave out the first token"));
      this.scale = element("span", { class: "scale", "aria-hidden": "true" });
      return [...nodes, this.scale];
    }

    offerHeads() {
      const [, heads] = this.data.layers[numberOf(this.layer)] ?? [0, []];
      offer(this.head, heads);
    }

    // The number of the plane that the choices name.
    get plane() {
      const layer = numberOf(this.layer);
      if (layer === MEAN) return 0;
      const before = this.data.layers.slice(0, layer);
      const first = before.reduce((n, [, heads]) => n + 1 + heads.length, 1);
      return first + 1 + numberOf(this.head);
    }

    listen(text) {
      const at = ({ target }) => {
        const i = this.tokens.indexOf(target);
        return this.rowAt.has(i) ? i : undefined;
      };
      const point = (i) => {
        if (i === this.pointed) return;
        this.pointed = i;
        this.draw();
      };
      text.addEventListener("pointerover", (event) => {
        if (event.pointerType !== "touch") point(at(event));
      });
      text.addEventListener("pointerleave", () => point(undefined));
      text.addEventListener("focusin", (event) => {
        if (event.target.matches(":focus-visible")) point(at(event));
      });
      text.addEventListener("focusout", () => point(undefined));
      text.addEventListener("click", (event) => {
        const i = at(event);
        if (i !== undefined) this.pin(i === this.pinned ? undefined : i);
      });
      text.addEventListener("keydown", (event) => {
        const i = at(event);
        if (i === undefined || event.ctrlKey || event.altKey || event.metaKey) return;
        const { key } = event;
        const { at: tokens } = this.data;
        const row = this.rowAt.get(i);
        const to = { ArrowLeft: row - 1, ArrowRight: row + 1, Home: 0, End: tokens.length - 1 }[key];
        if (to !== undefined) this.focus(this.tokens[tokens[to]]);
        else if (key === "Enter" || key === " ") this.pin(i === this.pinned ? undefined : i);
        else if (key === "Escape") this.pin(undefined);
        else return;
        event.preventDefault();
        event.stopPropagation();
      });
    }

    focus(node) {
      if (!node) return;
      this.stop.tabIndex = -1;
      this.stop = node;
      node.tabIndex = 0;
      node.focus();
    }

    pin(i) {
      this.tokens[this.pinned]?.setAttribute("aria-pressed", "false");
      this.tokens[i]?.setAttribute("aria-pressed", "true");
      this.pinned = i;
      this.draw();
    }

    // What the token *i* looked at, or all of them if it is undefined.
    sharesOf(i) {
      const { rows, plane } = this;
      const sum = new Float32Array(Math.max(...rows.nColumns));
      if (i !== undefined) {
        rows.add(sum, this.rowAt.get(i), plane, 1);
        return sum;
      }
      if (!this.means.has(plane)) {
        for (let row = 0; row < rows.length; row++) rows.add(sum, row, plane, 1 / rows.length);
        this.means.set(plane, sum);
      }
      return this.means.get(plane).slice();
    }

    draw() {
      const chosen = this.pointed ?? this.pinned;
      const shares = this.sharesOf(chosen);
      if (this.first.checked) shares[0] = 0;
      const most = shares.reduce((a, b) => Math.max(a, b), 0);
      this.tokens.forEach((node, i) => {
        const heat = most > 0 ? Math.round(N_HEATS * Math.sqrt((shares[i] ?? 0) / most)) : 0;
        const name = heat > 0 ? `token heat${heat}` : "token";
        if (node.className !== name) node.className = name;
      });
      this.scale.replaceChildren(...(most > 0 ? ["0", element("i", {}), percent(most)] : []));
      const top = [...shares.keys()].filter((i) => shares[i] > 0);
      top.sort((a, b) => shares[b] - shares[a]);
      this.list.replaceChildren(...top.slice(0, N_LISTED).map((i) => this.entry(i, shares[i], most)));
      this.what.replaceChildren(...this.sentence(chosen, top[0], most));
    }

    entry(i, share, most) {
      const { texts } = this.data;
      const around = (begin, end) => texts.slice(Math.max(0, begin), end).join("").replace(/\s+/g, " ");
      const place = [around(i - 2, i).trim(), element("strong", {}, quoted(texts[i])), around(i + 1, i + 2).trim()];
      const name = element("span", {}, ...place.filter(Boolean).flatMap((part) => [part, " "]));
      const node = element("li", {}, name, element("span", {}, percent(share)));
      node.style.setProperty("--part", `${(100 * share) / most}%`);
      return node;
    }

    sentence(chosen, top, most) {
      const { texts } = this.data;
      const n = this.rows.length;
      const who =
        chosen === undefined
          ? [`All ${count(n, "token")} together`]
          : [element("strong", {}, quoted(texts[chosen])), ` (${this.rowAt.get(chosen) + 1} of ${n})`];
      if (top === undefined) return [...who, " looked at nothing else."];
      return [...who, " looked most at ", element("strong", {}, quoted(texts[top])), `, ${percent(most)}`];
    }
  }

  const numberOf = ({ value }) => Number(value || MEAN);

  function offer(select, names) {
    const one = (value, text) => element("option", { value }, String(text));
    select.replaceChildren(one(MEAN, "Mean of all"), ...names.map((name, i) => one(i, name)));
    select.disabled = names.length === 0;
  }

  const here = document.currentScript?.getRootNode() ?? document;
  for (const host of here.querySelectorAll(".kqview-attention:not([data-live])")) {
    if (!host.querySelector("script")) continue;
    host.dataset.live = "";
    new View(host);
  }
})();

// The sequence of tokens: coloured by a figure, with a scrubber over the events, and beside it what
// the chosen token is and what it looked at. Tokens are laid out once; time and the mouse change
// classes only.

import { Coloured } from "./coloured.js";
import { choice, count, element, html, note, quoted, share } from "./dom.js";
import { barList, factList, named, remark } from "./parts.js";
import { Player } from "./player.js";
import { topTokens } from "./timeline.js";

// What a colour shows: no colour at the first end of the scale, full colour at the second.
const COLOURS = {
  // A token beyond the top tokens that a trace keeps counts as one that nobody expected.
  probability: [
    "Probability",
    (token) => 1 - (token.probability ?? (token.nTop > 0 ? 0 : NaN)),
    () => ["1", "0"],
  ],
  entropy: ["Entropy", (token) => token.entropy, (most) => ["0", `${most.toFixed(1)} nats`]],
  attention: [
    "Attention received",
    (token) => token.received || undefined,
    (most) => ["0", most.toFixed(2)],
  ],
  none: ["Nothing", () => undefined, () => []],
};
const N_SEEN = 12; // tokens of an attention row that the panel lists
const N_OTHERS = 5;
const N_SHOWN = 30_000; // more would make the browser slow; an engine's traces have fewer

// {node, show(step)} of the tab.
export class Tokens {
  constructor({ timeline, signal, address }) {
    this.timeline = timeline;
    this.address = address;
    this.chosen = undefined; // by keyboard or click: {item, node}
    this.seen = []; // nodes of the tokens that the shown one looked at
    this.about = html`<aside class="about" aria-label="About the token" aria-live="polite"></aside>`;
    this.legend = html`<span class="legend note"></span>`;
    this.layOut();
    const colours = Object.entries(COLOURS).map(([value, [title]]) => [value, title]);
    this.select = choice(colours, () => this.colour());
    if (!timeline.hasAttention) this.select.querySelector("[value=attention]").disabled = true;
    this.node = html`<div class="tokens">
      <div class="bar">
        <label class="inline">Colour by ${this.select}</label>
        ${this.legend}
        <span class="legend note" aria-hidden="true">
          <span class="token forced">forced</span><span class="token erased">taken back</span>
        </span>
      </div>
    </div>`;
    if (timeline.events.length > 0) {
      const player = new Player(timeline.events, (from, to) => this.seek(from, to), signal);
      this.node.append(player.node);
    }
    if (timeline.tokens.length > N_SHOWN) {
      const n = N_SHOWN.toLocaleString("en");
      this.node.append(remark(`The first ${n} of ${count(timeline.tokens.length, "token")}.`));
    }
    this.node.append(html`<div class="beside">${this.list}${this.about}</div>`);
    const hasOdds = timeline.tokens.some((token) => token.probability !== undefined);
    this.select.value = hasOdds ? "probability" : "none";
    this.colour();
    this.tell();
  }

  // The tokens of the prompt, where their texts are known, and every generated one, with a mark
  // where some were taken back.
  layOut() {
    const { prompt, tokens, erasures, events } = this.timeline;
    this.options = [];
    this.coloured = new Coloured((i) => [this.options[i].node]);
    this.nodes = new Map();
    this.changes = events.map(() => []); // [node, class, whether it is set from this event on]
    const given = prompt.some((token) => token.text !== undefined) ? prompt : [];
    const before = given.map((token) => this.option(token, tokenNode(token)));
    const made = [];
    const marks = [...erasures];
    const mark = (until) => {
      while (marks.length > 0 && marks[0].before <= until) made.push(this.mark(marks.shift()));
    };
    for (const token of tokens.slice(0, N_SHOWN)) {
      mark(token.index);
      const node = this.option(token, tokenNode(token));
      this.changes[token.born].push([node, "future", false]);
      if (token.died < Infinity) {
        this.changes[token.died].push([node, "erased", true]);
        node.classList.add("erased");
      }
      made.push(node);
    }
    if (tokens.length <= N_SHOWN) mark(Infinity);
    const groups = [
      ["Prompt", before],
      ["Generated tokens", made],
    ].filter(([, nodes]) => nodes.length > 0);
    this.list = html`<div role="listbox" class="sequence" tabindex="0" aria-label="Tokens"
        @keydown=${(event) => this.key(event)}
        @click=${(event) => this.choose(this.optionOf(event.target))}
        @pointerover=${(event) => this.tell(this.optionOf(event.target) ?? this.chosen)}
        @pointerleave=${() => this.tell(this.chosen)}>
      ${groups.map(
        ([name, nodes]) =>
          html`<div role="group" aria-label=${name} class=${name === "Prompt" && "prompt"}>${nodes}</div>`,
      )}
    </div>`;
    if (groups.length === 0) this.list = remark("No token was added.");
  }

  mark(erasure) {
    const node = html`<span class="mark">${markName(erasure.action)} ${erasure.n}</span>`;
    this.changes[erasure.at].push([node, "future", false]);
    return this.option(erasure, node);
  }

  option(item, node) {
    node.setAttribute("role", "option");
    node.setAttribute("aria-selected", false);
    node.id = `o${this.options.length}`;
    this.nodes.set(item, node);
    this.options.push({ item, node });
    return node;
  }

  optionOf(target) {
    const node = target.closest?.("[role=option]");
    return node ? this.options[Number(node.id.slice(1))] : undefined;
  }

  colour() {
    const [, of, ends] = COLOURS[this.select.value];
    const values = this.options
      .map(({ item }) => of(item))
      .map((v) => (Number.isFinite(v) ? v : 0));
    const most =
      this.select.value === "probability" ? 1 : values.reduce((a, b) => Math.max(a, b), 0) || 1;
    this.coloured.colour(values.map((value) => Math.round((10 * value) / most)));
    const [low, high] = ends(most);
    this.legend.replaceChildren(
      ...(low === undefined ? [] : [low, html`<span class="scale"></span>`, high]),
    );
  }

  // Moves from after event `from` to after event `to`.
  seek(from, to) {
    const isBack = to < from;
    let last;
    for (let at = Math.min(from, to) + 1; at <= Math.max(from, to); at++) {
      for (const [node, name, isSet] of this.changes[at]) {
        node.classList.toggle(name, isSet !== isBack);
        last = isBack ? (last ?? node) : node;
      }
    }
    last?.scrollIntoView({ block: "nearest" });
  }

  key(event) {
    const at = this.chosen ? this.options.indexOf(this.chosen) : -1;
    const last = this.options.length - 1;
    const to = {
      ArrowRight: Math.min(at + 1, last),
      ArrowLeft: Math.max(at - 1, 0),
      Home: 0,
      End: last,
      ArrowDown: () => this.vertical(at, 1),
      ArrowUp: () => this.vertical(at, -1),
      Enter: () => {
        const step = this.chosen?.item.step;
        if (step !== undefined) location.hash = this.address("steps", step);
      },
    }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    const index = typeof to === "function" ? to() : to;
    if (index !== undefined) this.choose(this.options[index]);
  }

  // The option of the next line that is nearest to the one at `at`.
  vertical(at, direction) {
    if (at < 0) return 0;
    const here = this.options[at].node.getBoundingClientRect();
    let line;
    let best = at;
    let distance = Infinity;
    for (let i = at + direction; this.options[i]; i += direction) {
      const box = this.options[i].node.getBoundingClientRect();
      if (Math.abs(box.top - here.top) < 4) continue;
      line ??= box.top;
      if (Math.abs(box.top - line) >= 4) break;
      if (Math.abs(box.left - here.left) < distance)
        [best, distance] = [i, Math.abs(box.left - here.left)];
    }
    return best;
  }

  // Chooses the first token of a step.
  show(step) {
    this.choose(this.options.find(({ item }) => item.step === step));
  }

  choose(option) {
    if (!option) return;
    this.chosen?.node.setAttribute("aria-selected", false);
    this.chosen = option;
    option.node.setAttribute("aria-selected", true);
    this.list.setAttribute("aria-activedescendant", option.node.id);
    option.node.scrollIntoView({ block: "nearest" });
    this.tell(option);
  }

  // Fills the panel, and marks in the sequence what the token looked at.
  tell(option) {
    if (option && option === this.told) return;
    this.told = option;
    for (const node of this.seen) node.classList.remove("seen");
    this.seen = [];
    if (!option) {
      const how = this.timeline.hasAttention ? "what it is and what it looked at" : "what it is";
      this.about.replaceChildren(
        remark(`Point at a token, or move with the arrow keys, to see ${how}.`),
        ...(this.timeline.hasAttention ? [] : [noAttention()]),
      );
      return;
    }
    const { item } = option;
    this.about.replaceChildren(
      ...(item.n === undefined ? this.aboutToken(item) : this.aboutErasure(item)),
    );
    const most = item.attention?.[0]?.weight ?? 1;
    for (const { token, weight } of item.attention ?? []) {
      const node = this.nodes.get(token);
      if (!node) continue;
      node.classList.add("seen");
      node.style.setProperty("--weight", (weight / most).toFixed(3));
      this.seen.push(node);
    }
  }

  aboutToken(token) {
    const facts = [
      ["Id", token.id ?? "unknown"],
      ["Position", token.position],
    ];
    if (!token.isPrompt) {
      facts.unshift(["Step", this.stepLink(token.step, token.step)]);
      facts.push(["Came as", token.isForced ? `forced${by(token)}` : "sampled"]);
      if (token.probability !== undefined)
        facts.push(["Probability", share(token.probability)], ["Rank", token.rank]);
      else if (token.nTop) facts.push(["Probability", `not among the top ${token.nTop}`]);
      if (token.entropy !== undefined) facts.push(["Entropy", `${token.entropy.toFixed(2)} nats`]);
      if (!token.isOutput) facts.push(["Output", "no: it ended the text, or was beyond a limit"]);
      if (token.died < Infinity)
        facts.push(["Taken back", `at step ${this.timeline.events[token.died].step}`]);
    }
    if (this.timeline.hasAttention) facts.push(["Attention received", token.received.toFixed(3)]);
    const others = topTokens(token.forward)
      .slice(0, N_OTHERS)
      .map((one) => [named(one), one.probability, share(one.probability)]);
    return [
      html`<h2>${token.text === undefined ? `token ${token.id}` : quoted(token.text)}</h2>`,
      factList(facts),
      ...(others.length > 0 ? [html`<h3>Likeliest here</h3>`, barList(others, 1)] : []),
      ...this.lookedAt(token),
    ];
  }

  stepLink(step, title) {
    return html`<a href=${this.address("steps", step)}>${title}</a>`;
  }

  lookedAt(token) {
    if (!this.timeline.hasAttention) return [noAttention()];
    if (token.isPrompt) return [];
    if (!token.attention)
      return [remark("The trace has no attention of this token.")];
    const rows = token.attention
      .slice(0, N_SEEN)
      .map(({ token: at, weight }) => [
        named(at),
        weight,
        share(weight),
        note(`at ${at.position}`),
      ]);
    return [html`<h3>Looked at</h3>`, barList(rows, rows[0]?.[1])];
  }

  aboutErasure({ n, action, at }) {
    const event = this.timeline.events[at];
    return [
      html`<h2>${markName(action)} ${n}</h2>`,
      html`<p>
        ${count(n, "token")} taken back${by(action)}, after ${event.event_type} of${" "}
        ${this.stepLink(event.step, `step ${event.step}`)}.
      </p>`,
    ];
  }
}

function tokenNode(token) {
  const kind = ["token", token.isForced && "forced", token.isOutput === false && "dropped"]
    .filter(Boolean)
    .join(" ");
  return element("span", { class: kind }, visible(token));
}

// Line ends and control characters as signs; a token without text by its id.
function visible({ text, id }) {
  if (text === undefined || text === "") return `⟨${id ?? "?"}⟩`;
  return text
    .replace(/\n/g, "↵\n")
    .replace(/[\u0000-\u0008\u000b-\u001f]/g, (c) => String.fromCharCode(0x2400 + c.charCodeAt(0)));
}

function markName(action) {
  return {
    Backtrack: "backtrack",
    ForceOutput: "replaced",
    ToolCalls: "tool call, dropped",
    EmitError: "error, dropped",
  }[action.action_type];
}

function by({ mod }) {
  return mod ? ` by ${mod}` : "";
}

function noAttention() {
  return remark(
    "This trace has no attention of single tokens: its request captured none, or the largest values " +
      "or sums of several (reduce max, spans, a mean of anything but probabilities).",
  );
}

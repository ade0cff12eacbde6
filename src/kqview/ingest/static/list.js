// The list of traces: newest first, filtered by the receiver, kept up to date while it is open.

import { client, fetchTraces, fetchValues, listen } from "./api.js";
import { count, field, html, milliseconds, note, offer, quietButton } from "./dom.js";
import { anyChoice, anyOf, badge, keyForm, problem } from "./parts.js";
import { traceAddress } from "./trace.js";

const TYPING_MS = 250; // a search begins when typing pauses
const REFRESH_MS = 500; // at most one refresh in this time, however many traces arrive

export function showList(main, signal) {
  document.title = "kqview traces";
  const list = new List(signal);
  main.replaceChildren(html`<h1>Traces</h1>`, ...list.nodes);
  list.open();
}

class List {
  constructor(signal) {
    this.signal = signal;
    this.query = new AbortController(); // of the filters as they are
    this.search = html`<input type="search" placeholder="Id, prompt or text" @input=${() => this.typed()}>`;
    this.model = anyChoice([], () => this.load());
    this.mod = anyChoice([], () => this.load());
    this.live = html`<span class="note" role="status"></span>`;
    this.state = html`<span class="note" role="status"></span>`;
    this.failure = html`<div></div>`;
    this.rows = html`<ul class="traces" aria-label="Traces"></ul>`;
    this.older = quietButton("Older traces", () => this.loadOlder(), { hidden: true });
    // Any key is taken, one of nobody's as well: whoever sees too little gives another.
    const askAgain = () => this.failure.replaceChildren(keyForm("Read with another key."));
    this.nodes = [
      html`<div class="bar filters">
        ${field("Search", this.search)}${field("Model", this.model)}${field("Mod", this.mod)}
      </div>`,
      html`<div class="bar">${this.live}${this.state}${client.key && quietButton("Change key", askAgain)}</div>`,
      this.failure,
      this.rows,
      this.older,
    ];
  }

  open() {
    this.loading = this.load();
    listen(this.signal, {
      event: () => {
        this.timer ??= setTimeout(() => this.refresh(), REFRESH_MS);
      },
      state: (isOn) => {
        this.live.className = `note dot ${isOn ? "on" : "off"}`;
        this.live.textContent = isOn ? "Live" : "Not live, trying again";
        if (isOn) this.refresh(); // what came before anybody listened
      },
    });
    this.signal.addEventListener("abort", () => {
      this.query.abort();
      clearTimeout(this.timer);
      clearTimeout(this.typing);
    });
  }

  typed() {
    clearTimeout(this.typing);
    this.typing = setTimeout(() => this.load(), TYPING_MS);
  }

  filters() {
    return { search: this.search.value.trim(), model: this.model.value, mod: this.mod.value };
  }

  // Reads the first page for the filters as they are now.
  async load() {
    this.query.abort();
    this.query = new AbortController();
    this.state.textContent = "Loading …";
    await this.attempt(async (signal) => {
      const [, values] = await Promise.all([this.read(signal, new Map()), fetchValues(signal)]);
      offer(this.model, anyOf(values.models));
      offer(this.mod, anyOf(values.mods));
    });
  }

  // Puts what has come since in front; what is there already stays where it is.
  async refresh() {
    clearTimeout(this.timer);
    this.timer = undefined;
    await this.loading;
    await this.attempt((signal) => this.read(signal));
  }

  async read(signal, shown) {
    const page = await fetchTraces(this.filters(), undefined, signal);
    const known = shown ?? this.known();
    const isGap = !page.traces.some((trace) => known.has(trace.request_id));
    const fresh = page.traces.map((trace) => {
      const made = row(trace, known.size > 0 && !known.has(trace.request_id));
      known.get(trace.request_id)?.remove();
      return made;
    });
    if (isGap) this.rows.replaceChildren();
    if (isGap || this.rows.childElementCount === 0) this.endsAt(page.next_cursor);
    this.rows.prepend(...fresh);
    this.tell();
  }

  async loadOlder() {
    await this.attempt(
      async (signal) => {
        const page = await fetchTraces(this.filters(), this.cursor, signal);
        const known = this.known();
        const more = page.traces.filter((trace) => !known.has(trace.request_id));
        this.rows.append(...more.map((trace) => row(trace)));
        this.endsAt(page.next_cursor);
      },
      () => this.loadOlder(),
    );
  }

  // The rows that are shown, by the ids of their traces.
  known() {
    return new Map([...this.rows.children].map((node) => [node.dataset.id, node]));
  }

  // Does *work* unless the filters change meanwhile; shows what went wrong with a way to try again.
  async attempt(work, again = () => this.load()) {
    const { signal } = this.query;
    try {
      await work(signal);
      this.failure.replaceChildren();
    } catch (error) {
      if (signal.aborted) return;
      this.state.textContent = "";
      this.failure.replaceChildren(problem(error, again));
    }
  }

  endsAt(cursor) {
    this.cursor = cursor;
    this.older.hidden = !cursor;
    this.tell();
  }

  tell() {
    const n = this.rows.childElementCount;
    const isFiltered = Object.values(this.filters()).some(Boolean);
    this.state.textContent =
      n > 0
        ? `${count(n, "trace")}${this.cursor ? ", and older ones" : ""}`
        : isFiltered
          ? "No trace matches."
          : "No traces yet. Whatever is posted to /ingest appears here.";
  }
}

function row(trace, isNew = false) {
  const facts = [
    trace.model,
    `${count(trace.n_added_tokens, "token")} added`,
    trace.n_forced_tokens > 0 && `${trace.n_forced_tokens.toLocaleString("en")} forced`,
    trace.n_actions > 0 && count(trace.n_actions, "action"),
    trace.mods.join(", "),
    trace.finish_reason,
    typeof trace.duration_ms === "number" && milliseconds(trace.duration_ms),
  ]
    .filter(Boolean)
    .join(" · ");
  return html`<li data-id=${trace.request_id} class=${isNew && "new"}>
    <a href=${traceAddress(trace.request_id)}>
      <span class="title">${trace.text || trace.request_id}</span>
      <time class="note" datetime=${trace.created_at}>${new Date(trace.created_at).toLocaleString()}</time>
      ${note(trace.text ? `${trace.request_id} · ${facts}` : facts)}
      ${trace.n_exceptions > 0 && badge(count(trace.n_exceptions, "exception"), "failed")}
    </a>
  </li>`;
}

// One trace: its facts and its tabs. A tab is drawn when it is first opened.

import { fetchTrace } from "./api.js";
import { button, count, html, milliseconds, note } from "./dom.js";
import { metricsView } from "./metrics.js";
import { disclosure, factList, problem, reload } from "./parts.js";
import { Steps } from "./steps.js";
import { timelineOf } from "./timeline.js";
import { Tokens } from "./tokens.js";

const SHOWN_CHARACTERS = 200_000; // of JSON; more would take a browser seconds to lay out
const TABS = [
  ["tokens", "Tokens", (context) => new Tokens(context)],
  ["steps", "Steps", (context) => new Steps(context)],
  ["metrics", "Metrics", metricsView],
  ["raw", "JSON", rawView],
];

export function traceAddress(id, tab = "tokens", step = undefined) {
  return `#/trace/${encodeURIComponent(id)}/${tab}${step === undefined ? "" : `/${step}`}`;
}

// Shows the trace and returns {open(tab, step)}; undefined if it could not be read.
export async function showTrace(main, id, signal) {
  const back = html`<p><a href="#/">All traces</a></p>`;
  main.replaceChildren(back, html`<p role="status">Loading the trace …</p>`);
  document.title = `${id} – kqview traces`;
  try {
    const { text, payload } = await fetchTrace(id, signal);
    const timeline = timelineOf(payload);
    const tabs = new Tabs(id, { timeline, payload, text, signal });
    main.replaceChildren(back, ...summary(timeline), tabs.bar, tabs.panel);
    return tabs;
  } catch (error) {
    if (!signal.aborted) main.replaceChildren(back, problem(error, reload));
    return undefined;
  }
}

function summary({ request, tokens, finalIds, calls, actions }) {
  const mods = [...new Set(calls.map((call) => call.mod_name))];
  const n_failed = calls.filter((call) => call.exception_occurred).length;
  const n_actions = actions.filter((action) => action.action_type !== "Noop").length;
  const [begin, end] = [request.created_at, request.completed_at];
  const took = begin && end ? milliseconds(Math.max(0, new Date(end) - new Date(begin))) : undefined;
  const facts = [
    ["Model", request.model],
    ["Started", begin && new Date(begin).toLocaleString()],
    ["Took", took],
    ["Ended by", request.finish_reason ?? request.inference_stats?.finish_reason],
    ["Tokens", finalIds.length],
    ["Added", tokens.length],
    ["Forced", tokens.filter((token) => token.isForced).length],
    ["Taken back", tokens.filter((token) => token.died < Infinity).length],
    ["Mods", mods.join(", ")],
    ["Actions", n_actions],
    ["Exceptions", n_failed, n_failed > 0 ? "bad" : undefined],
  ]
    .filter(([, value]) => value !== undefined && value !== null && value !== "")
    .map(([name, value, kind]) => [name, value.toLocaleString("en"), kind]);
  const texts = [
    ["Prompt", request.user_prompt],
    ["Final text", request.final_text],
  ]
    .filter(([, text]) => text)
    .map(([name, text]) => disclosure([name, note(count(text.length, "character"))], text, "text"));
  return [html`<h1 class="id">${request.request_id}</h1>`, factList(facts, "facts"), ...texts];
}

// A tab list as the ARIA practices have it: arrow keys move, the address names the tab.
class Tabs {
  constructor(id, context) {
    this.id = id;
    this.context = { ...context, address: (tab, step) => traceAddress(id, tab, step) };
    this.views = new Map();
    this.buttons = TABS.map(
      ([name, title]) =>
        html`<button role="tab" id=${`tab-${name}`} aria-controls="panel" @click=${() => this.go(name)}>
          ${title}
        </button>`,
    );
    this.bar = html`<div role="tablist" aria-label="Views of this trace" @keydown=${(e) => this.key(e)}>
      ${this.buttons}
    </div>`;
    this.panel = html`<section role="tabpanel" id="panel" tabindex="0"></section>`;
  }

  go(name) {
    location.hash = traceAddress(this.id, name);
  }

  key(event) {
    const at = this.buttons.indexOf(document.activeElement);
    const last = TABS.length - 1;
    const to = {
      ArrowRight: at === last ? 0 : at + 1,
      ArrowLeft: at === 0 ? last : at - 1,
      Home: 0,
      End: last,
    }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    this.buttons[to].focus();
    this.go(TABS[to][0]);
  }

  open(tab, step) {
    const [name, , draw] = TABS.find(([one]) => one === tab) ?? TABS[0];
    for (const button of this.buttons) {
      const isOpen = button.id === `tab-${name}`;
      button.setAttribute("aria-selected", isOpen);
      button.tabIndex = isOpen ? 0 : -1;
    }
    this.panel.setAttribute("aria-labelledby", `tab-${name}`);
    if (!this.views.has(name)) this.views.set(name, draw(this.context));
    const view = this.views.get(name);
    if (this.panel.firstChild !== view.node) this.panel.replaceChildren(view.node);
    if (step !== undefined && step !== "") view.show?.(Number(step));
  }
}

// The payload as it is stored, to read and to keep.
function rawView({ payload, text }) {
  const pretty = JSON.stringify(payload, null, 2);
  const name = `${String(payload.request.request_id).replace(/[^\w.-]+/g, "_")}.json`;
  const save = () => {
    const href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
    html`<a href=${href} download=${name}></a>`.click();
    setTimeout(() => URL.revokeObjectURL(href), 60_000);
  };
  const size =
    pretty.length > SHOWN_CHARACTERS
      ? `The first ${count(SHOWN_CHARACTERS, "character")} of ${pretty.length.toLocaleString("en")}; the download has all.`
      : count(pretty.length, "character");
  return {
    node: html`<div>
      <p class="bar">${button("Download", save)}${note(size)}</p>
      <pre tabindex="0" class="raw">${pretty.slice(0, SHOWN_CHARACTERS)}</pre>
    </div>`,
  };
}

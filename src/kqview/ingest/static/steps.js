// The trace as a tree: steps, their events, the mods that were called, what they did and said. A
// page of steps is drawn at a time, and a step's inside when it is first opened.

import { choice, count, field, html, milliseconds, note, quietButton, quoted, share } from "./dom.js";
import { anyChoice, badge, disclosure, named } from "./parts.js";
import { topTokens } from "./timeline.js";

const PER_PAGE = 100;
const N_TEXTS = 20; // tokens of one step that are written out
const SHOWN = [
  ["all", "All steps", () => true],
  ["active", "With mod activity", (step) => step.isActive],
  ["failed", "With exceptions", (step) => step.calls.some((call) => call.exception_occurred)],
  ["logs", "With logs", (step) => step.calls.some((call) => call.logs.length > 0)],
  ["forced", "With forced tokens", (step) => step.tokens.some((token) => token.isForced)],
];

// {node, show(step)} of the tab.
export class Steps {
  constructor({ timeline, address }) {
    this.address = address;
    this.steps = [...timeline.steps.values()].map((step) => {
      const calls = step.events.flatMap((event) => event.calls);
      const acts = calls
        .flatMap((call) => call.actions)
        .filter((one) => one.action_type !== "Noop");
      const isActive =
        acts.length > 0 || calls.some((call) => call.exception_occurred || call.logs.length > 0);
      return { ...step, calls, acts, isActive };
    });
    const kinds = [...new Set(timeline.actions.map((action) => action.action_type))].sort();
    const mods = [...new Set(timeline.calls.map((call) => call.mod_name))].sort();
    const redraw = () => this.filter();
    this.which = choice(SHOWN, redraw);
    this.kind = anyChoice(kinds, redraw);
    this.mod = anyChoice(mods, redraw);
    this.text = html`<input type="search" placeholder="Token, log or exception" @input=${redraw}>`;
    this.found = html`<p class="note" role="status"></p>`;
    this.pages = html`<nav class="bar" aria-label="Pages of steps"></nav>`;
    this.body = html`<div class="steps"></div>`;
    this.node = html`<div>
      <div class="bar filters">
        ${field("Show", this.which)}${field("Action", this.kind)}
        ${field("Mod", this.mod)}${field("Search", this.text)}
      </div>
      ${this.found}${this.body}${this.pages}
    </div>`;
    this.filter();
  }

  filter() {
    const [, , isShown] = SHOWN.find(([value]) => value === this.which.value);
    const [kind, mod] = [this.kind.value, this.mod.value];
    const text = this.text.value.trim().toLowerCase();
    this.matching = this.steps.filter(
      (step) =>
        isShown(step) &&
        (!kind ||
          step.calls.some((call) => call.actions.some((action) => action.action_type === kind))) &&
        (!mod || step.calls.some((call) => call.mod_name === mod)) &&
        (!text || words(step).includes(text)),
    );
    this.draw(0);
  }

  draw(page) {
    const from = page * PER_PAGE;
    const some = this.matching.slice(from, from + PER_PAGE);
    this.found.textContent =
      this.matching.length === this.steps.length
        ? count(this.steps.length, "step")
        : `${this.matching.length.toLocaleString("en")} of ${count(this.steps.length, "step")}`;
    this.body.replaceChildren(...some.map((step) => this.row(step)));
    const n_pages = Math.ceil(this.matching.length / PER_PAGE);
    const turn = (target) => {
      this.draw(target);
      this.node.scrollIntoView();
    };
    const to = (name, target) =>
      quietButton(name, () => turn(target), { disabled: target < 0 || target >= n_pages });
    if (n_pages < 2) return this.pages.replaceChildren();
    const place = html`<span>Page ${page + 1} of ${n_pages}</span>`;
    this.pages.replaceChildren(to("Earlier", page - 1), place, to("Later", page + 1));
  }

  // Opens a step and scrolls to it, whatever the filters were.
  show(number) {
    let at = this.matching.findIndex((one) => one.step === number);
    if (at < 0) {
      for (const input of [this.which, this.kind, this.mod]) input.selectedIndex = 0;
      this.text.value = "";
      this.filter();
      at = this.matching.findIndex((one) => one.step === number);
    }
    if (at < 0) return;
    this.draw(Math.floor(at / PER_PAGE));
    const row = this.body.children[at % PER_PAGE];
    row.open = true;
    row.scrollIntoView({ block: "center" });
    row.querySelector("summary").focus({ preventScroll: true });
  }

  row(step) {
    const time = step.calls.reduce((sum, call) => sum + (call.execution_time_ms ?? 0), 0);
    const names = [...new Set(step.acts.map((action) => action.action_type))];
    const row = html`<details class="step" data-step=${step.step}>
      <summary>
        <span class="number">${step.step}</span>
        <span class="made">${codes(step.tokens)}</span>
        ${names.map((name) => badge(name))}
        ${step.calls.some((call) => call.exception_occurred) && badge("exception", "failed")}
        ${step.calls.length > 0 && note(milliseconds(time))}
      </summary>
    </details>`;
    const fill = () => {
      if (row.open && row.childElementCount === 1) row.append(...this.inside(step));
    };
    row.addEventListener("toggle", fill);
    if (step.isActive) {
      row.open = true;
      fill();
    }
    return row;
  }

  inside(step) {
    return step.events.map(
      (event) => html`<div class="event">
        <h2>${event.event_type}</h2>
        ${about(event, step)}${event.calls.map((call) => callCard(call))}
      </div>`,
    );
  }
}

function about(event, step) {
  if (event.event_type === "Prefilled") {
    const limit = event.max_steps > 0 ? `, at most ${count(event.max_steps, "step")}` : "";
    return html`<p>Prompt of ${count(event.prompt_length ?? 0, "token")}${limit}.</p>`;
  }
  if (event.event_type === "ForwardPass") {
    const top = topTokens(event).slice(0, 3);
    const chance = (one) =>
      html`<span class="chance"><code>${named(one)}</code> ${share(one.probability)}</span>`;
    return [
      event.input_text && html`<p class="input"><code>${quoted(event.input_text)}</code></p>`,
      top.length > 0 && html`<p>${top.map(chance)}</p>`,
    ];
  }
  if (event.event_type === "Sampled") {
    return html`<p><code>${quoted(event.token_text ?? "")}</code> id ${event.sampled_token}</p>`;
  }
  const ids = event.added_tokens ?? [];
  const tokens = step.tokens.filter((token) => token.born === event.at).slice(0, ids.length);
  const what = `${count(ids.length, "token")}${event.forced ? ", forced" : ""}: `;
  return html`<p>${what}${codes(tokens)}</p>`;
}

function codes(tokens) {
  const kind = (token) => (token.died < Infinity ? "erased" : token.isForced && "forced");
  const more = tokens.length - N_TEXTS;
  return [
    ...tokens.slice(0, N_TEXTS).map((token) => html`<code class=${kind(token)}>${named(token)}</code>`),
    more > 0 && note(` and ${count(more, "more", "more")}`),
  ];
}

function callCard(call) {
  const failure = call.exception_message || "An exception without a message.";
  const line = (log) => html`<li class=${log.log_level?.toLowerCase()}>
    <span class="level">${log.log_level ?? "INFO"}</span>${log.log_message}
  </li>`;
  return html`<div class=${call.exception_occurred ? "call failed" : "call"}>
    <h3>${call.mod_name}${note(milliseconds(call.execution_time_ms))}</h3>
    ${call.exception_occurred && html`<p class="bad">${failure}</p>`}
    ${call.exception_traceback && disclosure("Traceback", call.exception_traceback)}
    ${call.logs.length > 0 && html`<ul class="logs">${call.logs.map(line)}</ul>`}
    ${call.actions.map((action) => actionCard(action))}
  </div>`;
}

function actionCard(action) {
  const { mod, action_type, action_order, mod_call_sequence, created_at, details, ...payload } =
    action;
  if (action_type === "Noop") return html`<p class="note">Noop</p>`;
  const isLate = details?.is_applied === false;
  return html`<div class="action">
    <p>
      ${badge(action_type)}${" "}${inWords(action)}
      ${isLate && note(" Without effect: another mod's action came first.")}
    </p>
    ${Object.keys(payload).length > 0 && disclosure("Payload", JSON.stringify(payload, null, 2))}
  </div>`;
}

function inWords(action) {
  const tokens = Array.isArray(action.tokens_as_text)
    ? action.tokens_as_text.join("")
    : action.tokens_preview;
  const text = tokens ? ` ${quoted(tokens)}` : "";
  const n = action.token_count ?? action.tokens?.length ?? 0;
  switch (action.action_type) {
    case "ForceTokens":
      return `${count(n, "token")}${text}`;
    case "ForceOutput":
      return `the whole output is ${count(n, "token")}${text}`;
    case "Backtrack":
      return `takes back ${count(action.backtrack_steps ?? 0, "token")}${n > 0 ? `, adds ${count(n, "token")}${text}` : ""}`;
    case "AdjustedPrefill":
      return `the prompt has ${count(action.new_length ?? n, "token")}${action.new_prompt ? ` ${quoted(action.new_prompt)}` : ""}`;
    case "AdjustedLogits":
      return [
        action.logits_shape && `logits ${action.logits_shape}`,
        action.temperature !== undefined && `temperature ${action.temperature}`,
      ]
        .filter(Boolean)
        .join(", ");
    case "EmitError":
      return quoted(action.error_message ?? "");
    case "ToolCalls":
      return JSON.stringify(action.tool_calls ?? null);
    default:
      return "";
  }
}

// All that a search looks through, in lower case.
function words(step) {
  return [
    step.tokens.map((token) => token.text ?? "").join(""),
    ...step.calls.flatMap((call) => [
      call.mod_name,
      call.exception_message ?? "",
      ...call.logs.map((log) => log.log_message),
    ]),
  ]
    .join("\n")
    .toLowerCase();
}

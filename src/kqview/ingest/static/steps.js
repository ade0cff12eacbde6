// The trace as a tree: steps, their events, the mods that were called, what they did and said. A
// page of steps is drawn at a time, and a step's inside when it is first opened.

import {
  choice,
  count,
  element,
  field,
  milliseconds,
  note,
  quietButton,
  quoted,
  share,
} from "./dom.js";
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

export function stepsView(context) {
  const view = new Steps(context);
  return { node: view.node, show: (step) => view.show(step) };
}

class Steps {
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
    this.text = element("input", {
      type: "search",
      placeholder: "Token, log or exception",
      oninput: redraw,
    });
    this.found = element("p", { class: "note", role: "status" });
    this.pages = element("nav", { class: "bar", "aria-label": "Pages of steps" });
    this.body = element("div", { class: "steps" });
    this.node = element(
      "div",
      {},
      element(
        "div",
        { class: "bar filters" },
        field("Show", this.which),
        field("Action", this.kind),
        field("Mod", this.mod),
        field("Search", this.text),
      ),
      this.found,
      this.body,
      this.pages,
    );
    this.filter();
  }

  filter() {
    const [, , isShown] = SHOWN.find(([value]) => value === this.which.value);
    const [kind, mod, text] = [
      this.kind.value,
      this.mod.value,
      this.text.value.trim().toLowerCase(),
    ];
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
    const to = (name, target) =>
      quietButton(name, () => this.turn(target), { disabled: target < 0 || target >= n_pages });
    this.pages.replaceChildren(
      ...(n_pages < 2
        ? []
        : [
            to("Earlier", page - 1),
            element("span", {}, `Page ${page + 1} of ${n_pages}`),
            to("Later", page + 1),
          ]),
    );
  }

  turn(page) {
    this.draw(page);
    this.node.scrollIntoView();
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
    const summary = element(
      "summary",
      {},
      element("span", { class: "number" }, String(step.step)),
      element("span", { class: "made" }, codes(step.tokens)),
      names.map((name) => badge(name)),
      step.calls.some((call) => call.exception_occurred) && badge("exception", "failed"),
      step.calls.length > 0 && note(milliseconds(time)),
    );
    const row = element("details", { class: "step", "data-step": step.step }, summary);
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
    return step.events.map((event) =>
      element(
        "div",
        { class: "event" },
        element("h2", {}, event.event_type),
        ...about(event, step),
        event.calls.map((call) => callCard(call)),
      ),
    );
  }
}

function about(event, step) {
  if (event.event_type === "Prefilled") {
    const limit = event.max_steps > 0 ? `, at most ${count(event.max_steps, "step")}` : "";
    return [element("p", {}, `Prompt of ${count(event.prompt_length ?? 0, "token")}${limit}.`)];
  }
  if (event.event_type === "ForwardPass") {
    const top = topTokens(event).slice(0, 3);
    return [
      event.input_text &&
        element("p", { class: "input" }, element("code", {}, quoted(event.input_text))),
      top.length > 0 &&
        element(
          "p",
          {},
          top.map((one) =>
            element(
              "span",
              { class: "chance" },
              element("code", {}, named(one)),
              ` ${share(one.probability)}`,
            ),
          ),
        ),
    ];
  }
  if (event.event_type === "Sampled") {
    const text = element("code", {}, quoted(event.token_text ?? ""));
    return [element("p", {}, text, ` id ${event.sampled_token}`)];
  }
  const ids = event.added_tokens ?? [];
  const tokens = step.tokens.filter((token) => token.born === event.at).slice(0, ids.length);
  const what = `${count(ids.length, "token")}${event.forced ? ", forced" : ""}: `;
  return [element("p", {}, what, codes(tokens))];
}

function codes(tokens) {
  const some = tokens
    .slice(0, N_TEXTS)
    .map((token) =>
      element(
        "code",
        { class: token.died < Infinity ? "erased" : token.isForced ? "forced" : undefined },
        named(token),
      ),
    );
  return tokens.length > N_TEXTS
    ? [...some, note(` and ${count(tokens.length - N_TEXTS, "more", "more")}`)]
    : some;
}

function callCard(call) {
  return element(
    "div",
    { class: call.exception_occurred ? "call failed" : "call" },
    element("h3", {}, call.mod_name, note(milliseconds(call.execution_time_ms))),
    call.exception_occurred &&
      element("p", { class: "bad" }, call.exception_message || "An exception without a message."),
    call.exception_traceback && disclosure("Traceback", call.exception_traceback),
    call.logs.length > 0 &&
      element(
        "ul",
        { class: "logs" },
        call.logs.map((log) =>
          element(
            "li",
            { class: log.log_level?.toLowerCase() },
            element("span", { class: "level" }, log.log_level ?? "INFO"),
            log.log_message,
          ),
        ),
      ),
    call.actions.map((action) => actionCard(action)),
  );
}

function actionCard(action) {
  const { mod, action_type, action_order, mod_call_sequence, created_at, details, ...payload } =
    action;
  if (action_type === "Noop") return element("p", { class: "note" }, "Noop");
  return element(
    "div",
    { class: "action" },
    element(
      "p",
      {},
      badge(action_type),
      " ",
      inWords(action),
      details?.is_applied === false && note(" Without effect: another mod's action came first."),
    ),
    Object.keys(payload).length > 0 && disclosure("Payload", JSON.stringify(payload, null, 2)),
  );
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

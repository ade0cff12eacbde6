// The chat page. The address names the conversation, "#/ID"; without one a new one begins with the
// first message. The parts know nothing of each other; here they meet.

import { ApiError } from "../client.js";
import { moveFocus } from "../coloured.js";
import { button, html, quietButton } from "../dom.js";
import { Answer } from "./answer.js";
import { Attention } from "./attention.js";
import { cancel, client, fetchConfig, fetchSession, generate, listen, newId } from "./api.js";
import { icon } from "./icons.js";
import { Models } from "./models.js";
import { Sessions } from "./sessions.js";
import { Settings } from "./settings.js";
import { Sources } from "./sources.js";

const ENDS_WITHIN_MS = 3000; // after a cancel; then the connection is dropped
const POLL_MS = 500;
const ENDS = { cancelled: "stopped", length: "cut at the most tokens" }; // others need no word
const SAID_CHARACTERS = 1000; // of an answer that a screen reader reads out
const LONG_CONTEXT = 8192; // above it, rows come as means over the heads

const $ = (id) => document.getElementById(id);
const say = (text) => ($("said").textContent = text);
const isNarrow = matchMedia("(max-width: 60rem)");

// ---- the parts

const attention = new Attention();
const settings = new Settings();
const sources = new Sources();
const models = new Models({ change: () => modelChanged(), problem: (error) => report(error) });
const sessions = new Sessions($("sessions"), {
  open: (id) => go(id),
  problem: (error) => report(error),
});

let session; // id of the conversation that is shown; undefined for a new one
let edited; // the message of the user that the next one replaces, with all that follows
let running; // the answer that comes: {answer, requestId, abort, and what its frames said}

// ---- the frame of the page

const menu = $("menu");
menu.append(icon("menu"));
menu.addEventListener("click", () => toggleMenu());
const toggles = {};
for (const [name, drawing] of [["sources", "book"], ["attention", "eye"], ["settings", "settings"]]) {
  toggles[name] = $(`toggle-${name}`);
  toggles[name].prepend(icon(drawing));
  toggles[name].addEventListener("click", () => showPanel(name));
}
$("model").append(models.select, models.state);

const prompt = $("prompt");
prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
const sending = $("send");
sending.append(icon("send"));
const latest = $("latest");
latest.append(icon("down"));
latest.addEventListener("click", () => toEnd(true));
$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) stop();
  else send();
});

const keyInput = html`<input type="password" autocomplete="off" value=${client.key}>`;
const useKey = (event) => {
  event.preventDefault();
  client.key = keyInput.value;
  start();
};
const keyForm = html`<form class="key" @submit=${useKey}>
  <label>API key${keyInput}</label>
  <button class="quiet">Use this key</button>
</form>`;

// Shows the panel *name*, or no panel if it is there already or *name* is undefined.
function showPanel(name) {
  const panel = $("panel");
  const before = panel.dataset.shows;
  const shows = name === before ? undefined : name;
  for (const [one, node] of Object.entries(toggles)) node.setAttribute("aria-pressed", one === shows);
  panel.hidden = !shows;
  panel.dataset.shows = shows ?? "";
  document.body.dataset.panel = shows ?? "";
  if (!shows) {
    if (before) toggles[before]?.focus();
    return;
  }
  const title = toggles[shows].textContent;
  panel.setAttribute("aria-label", title);
  panel.replaceChildren(
    html`<div class="over">
      <h2>${title}</h2>
      ${quietButton(icon("close"), () => showPanel(undefined), { "aria-label": `Close ${title}` })}
    </div>`,
    { sources, attention }[shows]?.node ?? settingsParts(),
  );
  if (shows === "attention") attention.later();
}

function settingsParts() {
  return html`
    <h3>Answers</h3>
    ${settings.node}
    <h3>Conversation</h3>
    ${quietButton([icon("download"), "Export as Markdown"], exportChat, { class: "quiet new" })}
    <h3>Models</h3>
    ${models.list}
    <h3>Access</h3>
    ${keyForm}
  `;
}

function toggleMenu(isOpen = document.body.dataset.menu !== "open") {
  document.body.dataset.menu = isOpen ? "open" : "";
  menu.setAttribute("aria-expanded", isOpen);
  if (isOpen) $("sessions").querySelector("button").focus();
}

function modelChanged() {
  const { chosen } = models;
  if (running?.answer && !running.hasBegun && chosen?.state === "loading") {
    running.answer.wait(`Loading ${chosen.id}`, chosen.progress ?? 0);
  }
  if (welcome) welcome.about.textContent = chosen ? aboutModel(chosen) : "";
}

// ---- the transcript

let welcome;

function showWelcome() {
  welcome = { about: html`<p class="note"></p>` };
  $("turns").replaceChildren(
    html`<div class="welcome">
      <h2>What shall the model write?</h2>
      ${welcome.about}
      <p class="note">Open Attention first to see which words of the prompt the answer looks at.</p>
    </div>`,
  );
  modelChanged();
}

function aboutModel({ id, context_length: n }) {
  return n ? `${id} reads up to ${n.toLocaleString("en")} tokens.` : id;
}

function addTurn(node) {
  if (welcome) $("turns").replaceChildren();
  welcome = undefined;
  $("turns").append(node);
  toEnd();
}

// A message of the user. `isKept` says whether the server has it, with an answer.
function userTurn(text, isKept = false) {
  const node = html`<article class="turn user" aria-label="You">
    <div class="text">${text}</div>
    <div class="foot">${act("copy", "Copy", () => copy(text))}${act("edit", "Edit", () => edit(node))}</div>
  </article>`;
  return Object.assign(node, { text, isKept });
}

// An answer of a conversation that was opened.
function oldAnswer({ content, reasoning }) {
  const answer = new Answer();
  if (reasoning) answer.reason(reasoning);
  answer.writers.token.write(content);
  answer.end();
  offerActs(answer);
  return answer.node;
}

// What can be done with an answer that has ended.
function offerActs(answer) {
  answer.foot.append(
    act("copy", "Copy", () => copy(answer.text)),
    act("again", "Regenerate", () => regenerate(answer.node)),
  );
}

const act = (drawing, title, onclick) =>
  quietButton(icon(drawing), onclick, { "aria-label": title, title, class: "quiet act" });

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    say("Copied.");
  } catch {
    say("The browser does not allow to copy.");
  }
}

const userTurns = () => [...$("turns").querySelectorAll(".user")];

// Removes *node* and what follows it from the page.
function removeFrom(node) {
  while (node.nextSibling) node.nextSibling.remove();
  node.remove();
}

// How many messages the server has of *turn* and those after it.
function countKept(turn) {
  const turns = userTurns();
  return 2 * turns.slice(turns.indexOf(turn)).filter(({ isKept }) => isKept).length;
}

// Asks the question of an answer again; what followed it is replaced.
function regenerate(node) {
  const turn = userTurns().findLast((one) => one.compareDocumentPosition(node) & Node.DOCUMENT_POSITION_FOLLOWING);
  if (running || !turn) return;
  edited = turn;
  send(turn.text);
}

// Puts a message of the user into the box; the one that is sent replaces it and what follows.
function edit(turn) {
  if (running) return;
  edited = turn;
  prompt.value = turn.text;
  prompt.focus();
  showKeys();
}

const keys = $("keys").textContent;
const showKeys = () =>
  ($("keys").textContent = edited ? "Enter sends in place of that message and of what follows, Esc leaves it." : keys);

async function exportChat() {
  const { messages } = session ? await fetchSession(session) : { messages: [] };
  const parts = messages.map(({ role, content }) => `## ${role === "user" ? "You" : "Answer"}\n\n${content}\n`);
  const title = $("title").textContent;
  const file = new Blob([`# ${title}\n\n${parts.join("\n")}`], { type: "text/markdown" });
  const href = URL.createObjectURL(file);
  const name = `${title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "") || "chat"}.md`;
  html`<a href=${href} download=${name}></a>`.click();
  setTimeout(() => URL.revokeObjectURL(href));
}

let isAtEnd = true;
new IntersectionObserver(
  ([{ isIntersecting }]) => {
    isAtEnd = isIntersecting;
    latest.hidden = isAtEnd;
  },
  { root: $("transcript"), rootMargin: "0px 0px 48px 0px" },
).observe($("end"));

function toEnd(always = false) {
  if (always || isAtEnd) $("transcript").scrollTop = $("transcript").scrollHeight;
}

// An error, with what can be done about it.
function report(error, again) {
  if (error.needsKey) keyInput.value = client.key;
  const node = html`<div class="turn problem" role="alert">
    <p><code>${error.code ?? error.name}</code>${" "}${error.message}</p>
    ${error.needsKey && keyForm}
    ${again && quietButton("Try again", () => (node.remove(), again()))}
  </div>`;
  addTurn(node);
  if (error.needsKey) keyInput.focus();
}

// ---- a message and its answer

// *tried* is the turn that the transcript has already, and how many messages are replaced by it.
async function send(text = prompt.value.trim(), tried) {
  if (running || !text || !models.chosen) return;
  const replaces = tried?.replaces ?? (edited ? countKept(edited) : 0);
  if (edited) {
    removeFrom(edited);
    edited = undefined;
    showKeys();
  }
  const requestId = newId();
  if (!session) {
    session = newId();
    history.replaceState(null, "", `#/${session}`);
  }
  const turn = tried?.turn ?? userTurn(text);
  if (!tried) {
    prompt.value = "";
    addTurn(turn);
  }
  const here = { requestId, abort: new AbortController(), documents: sources.documents };
  const answer = (here.answer = new Answer({
    onmark: (mark) => {
      here.looked ??= attention.begin(requestId);
      mark.looked = here.looked;
      here.looked.add(mark);
    },
  }));
  answer.ondraw = () => toEnd();
  running = here;
  answer.wait("Waiting for the model");
  watchLoading(here);
  addTurn(answer.node);
  toEnd(true);
  setSending(true);
  say("The model is answering.");
  const request = { session_id: session, model: models.chosen.id, prompt: text, ...fields(here), replaces };
  let problem;
  try {
    await generate(request, requestId, here.abort.signal, (event, data) => frame(here, event, data));
    if (!here.end) throw new ApiError("CONNECTION_LOST", "The connection ended before the answer.");
    problem = here.error;
  } catch (error) {
    if (error.name !== "AbortError") problem = error instanceof ApiError ? error : lost(error);
  }
  running = undefined;
  setSending(false);
  answer.end(here.usage, ENDS[here.end?.stop_reason] ?? (here.isStopped && ENDS.cancelled));
  here.looked?.end();
  makeFocusable(here.looked);
  if (!answer.text && !here.usage) answer.node.remove();
  if (answer.text) {
    offerActs(answer);
    turn.isKept = true;
  }
  const again = () => {
    const isKept = Boolean(answer.text); // what came of it is replaced
    answer.node.remove();
    send(text, { turn, replaces: isKept ? 2 : replaces });
  };
  if (problem) report(problem, again);
  else say(answer.text ? `Answer: ${answer.text.slice(0, SAID_CHARACTERS)}` : "The answer is empty.");
  toEnd();
  sessions.load().then(showTitle, () => {});
  if (models.chosen?.state !== "loaded") models.load().catch(() => {});
}

// Follows the loading of the model that *here* waits for, as far as events do not tell.
async function watchLoading(here) {
  while (here === running && !here.hasBegun) {
    if (models.chosen?.state !== "loaded") await models.load().catch(() => {});
    await new Promise((done) => setTimeout(done, POLL_MS));
  }
}

const lost = () => new ApiError("CONNECTION_LOST", "The connection was lost during the answer.");

// Fields of a request: settings, sources, and the attention that is wanted.
function fields({ documents }) {
  const { system, overrides } = settings.fields();
  if (documents || $("panel").dataset.shows !== "attention") return { system, overrides, documents };
  const hasLongContext = (models.chosen.context_length ?? 0) > LONG_CONTEXT;
  const rows = hasLongContext ? { reduce: "mean_heads" } : { format: "per_layer" };
  const attention = { values: "probs", dtype: "float16", ...rows };
  return { system, overrides: { ...overrides, attention } };
}

function frame(here, event, data) {
  if (event === "token" || event === "analysis") {
    here.hasBegun = true;
    here.answer.write(event, data);
  } else if (event === "reasoning") here.answer.reason(data.reasoning);
  else if (event === "citation") here.answer.append(sources.sign(here.documents, data, openSources));
  else if (event === "usage") here.usage = data;
  else if (event === "error") here.error = ApiError.of(data);
  else if (event === "end") here.end = data;
}

function openSources() {
  if ($("panel").dataset.shows !== "sources") showPanel("sources");
}

// Ends the answer; what was produced stays.
async function stop() {
  const here = running;
  if (!here || here.isStopped) return;
  here.isStopped = true;
  const giveUp = setTimeout(() => here.abort.abort(), ENDS_WITHIN_MS);
  try {
    await cancel(here.requestId);
  } catch {
    here.abort.abort(); // it does not run: perhaps it has not begun
    clearTimeout(giveUp);
  }
}

function setSending(isRunning) {
  sending.replaceChildren(icon(isRunning ? "stop" : "send"));
  sending.setAttribute("aria-label", isRunning ? "Stop" : "Send");
  document.body.dataset.running = isRunning ? "yes" : "";
}

// ---- tokens of answers: pointing and keys

function makeFocusable(looked) {
  const first = looked?.marks.find(({ channel }) => channel === "token")?.nodes[0];
  if (first) first.tabIndex = 0;
}

const markOf = (target) => target.closest?.(".token")?.mark;

$("turns").addEventListener("pointerover", ({ target }) => {
  if ($("panel").dataset.shows === "attention") attention.point(markOf(target));
});
$("turns").addEventListener("pointerleave", () => attention.point(undefined));
$("turns").addEventListener("click", ({ target }) => {
  const mark = markOf(target);
  if (!mark?.looked || String(getSelection())) return;
  if ($("panel").dataset.shows !== "attention") showPanel("attention");
  attention.choose(mark === attention.chosen ? undefined : mark);
});
$("turns").addEventListener("focusin", ({ target }) => {
  const mark = markOf(target);
  if (mark?.looked && $("panel").dataset.shows === "attention") attention.choose(mark);
});
$("turns").addEventListener("keydown", (event) => {
  const mark = markOf(event.target);
  if (!mark?.looked) return;
  const { marks } = mark.looked;
  if (event.key === "Enter") showPanel("attention");
  moveFocus(event, marks.map(({ nodes }) => nodes[0]), marks.indexOf(mark));
});

document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
  if (running) stop();
  else if (edited) {
    edited = undefined;
    prompt.value = "";
    showKeys();
  } else if (document.body.dataset.menu === "open") {
    toggleMenu(false);
    menu.focus();
  } else if (attention.chosen) attention.choose(undefined);
  else if (isNarrow.matches && !$("panel").hidden) showPanel(undefined);
});

// ---- conversations

function go(id) {
  const address = id ? `#/${encodeURIComponent(id)}` : "#/";
  if (location.hash === address || (!id && !location.hash)) show();
  else location.hash = address;
}

// The conversation that an address names; undefined for a new one, or an address that is broken.
function named(hash) {
  try {
    return decodeURIComponent(hash.slice(2)) || undefined;
  } catch {
    return undefined;
  }
}

// Shows the conversation that the address names.
async function show() {
  const id = named(location.hash);
  if (id && id === session && $("turns").childElementCount > 0) return;
  running?.abort.abort();
  session = id;
  edited = undefined;
  showKeys();
  toggleMenu(false);
  attention.close();
  sessions.show(id);
  showTitle();
  showWelcome();
  if (!isNarrow.matches) prompt.focus();
  if (!id) return;
  try {
    const { messages, model } = await fetchSession(id);
    if (session !== id || running) return;
    models.choose(model);
    const shown = messages.filter(({ role }) => role === "user" || role === "assistant");
    for (const one of shown) addTurn(one.role === "user" ? userTurn(one.content, true) : oldAnswer(one));
    toEnd(true);
  } catch (error) {
    if (session === id) report(error);
  }
}

function showTitle() {
  sessions.show(session);
  $("title").textContent = session ? sessions.titleOf(session) : "New chat";
  document.title = session ? `${sessions.titleOf(session)} – kqview` : "kqview: chat";
}

document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  prompt.focus();
});
addEventListener("hashchange", show);

// ---- the server

// Reads what the server has; with another key that may be something else.
async function start() {
  session = undefined;
  try {
    const config = await fetchConfig();
    models.isAdmin = config.ui_mode === "admin";
    settings.offer(config.reasoning_presets ?? []);
    await models.load();
    await sessions.load();
    await show();
    hear();
  } catch (error) {
    $("turns").replaceChildren();
    welcome = undefined;
    report(error, error.needsKey ? undefined : start);
  }
}

let hearing; // ends the reading of events

// Follows the server's events; after a break everything is read again. Hidden tabs do not: a
// browser has few connections for all of them.
async function hear() {
  if (hearing || document.hidden) return;
  const here = (hearing = new AbortController());
  await listen(here.signal, {
    event: ({ event, data }) => models.happened(event, JSON.parse(data)),
    state: (isListening) => {
      $("link").textContent = isListening ? "" : "The server does not answer. Trying again …";
      if (isListening && wasAway) {
        models.load().catch(() => {});
        sessions.load().then(showTitle, () => {});
      }
      wasAway = !isListening;
    },
  });
  if (hearing === here) hearing = undefined;
}

let wasAway = true; // whether events were missed: at first, those before it listened

document.addEventListener("visibilitychange", () => {
  if (!document.hidden) return void hear();
  hearing?.abort();
  hearing = undefined;
  wasAway = true;
});

showWelcome();
start();

// Which model answers, what state each is in, and for admins what is kept in memory.

import { html, offer, quietButton } from "../dom.js";
import { fetchModels, manage } from "./api.js";

const CHOSEN = "kqview-chat-model";
const STATES = {
  unloaded: "loads when it is first used",
  loaded: "loaded",
  failed: "failed to load",
};
// Event of the server -> state of its model.
const EVENTS = {
  ModelLoading: "loading",
  ModelLoaded: "loaded",
  ModelUnloaded: "unloaded",
  ModelFailed: "failed",
};

export class Models {
  // on.change: the chosen model or the state of one has changed; on.problem(error).
  constructor(on) {
    this.on = on;
    this.all = [];
    this.isAdmin = false;
    const choose = () => {
      sessionStorage.setItem(CHOSEN, this.select.value);
      this.draw();
    };
    this.select = html`<select aria-label="Model" @change=${choose}></select>`;
    this.state = html`<span class="note"></span>`;
    this.list = html`<ul class="models"></ul>`;
  }

  get chosen() {
    return this.all.find(({ id }) => id === this.select.value);
  }

  choose(id) {
    if (!this.all.some((model) => model.id === id)) return;
    this.select.value = id;
    this.draw();
  }

  async load() {
    this.all = (await fetchModels()).filter(({ flags }) => !flags?.internal);
    const before = this.select.value || sessionStorage.getItem(CHOSEN);
    offer(this.select, this.all.map(({ id }) => [id, id]), before);
    this.draw();
  }

  // An event of the server; others than those of models change nothing.
  happened(name, data) {
    const state = EVENTS[name];
    const model = state && this.all.find(({ id }) => id === data.model_id);
    if (!model) return;
    Object.assign(model, { state, progress: data.progress, error: data.error });
    this.draw();
  }

  draw() {
    const { chosen } = this;
    this.state.replaceChildren(...(chosen ? stateParts(chosen) : []));
    this.list.replaceChildren(...this.all.map((model) => this.row(model)));
    this.on.change();
  }

  row(model) {
    const act = (what) => async () => {
      try {
        await manage(model.id, what);
        await this.load();
      } catch (error) {
        this.on.problem(error);
      }
    };
    const action = (title, what) =>
      quietButton(title, act(what), { "aria-label": `${title} ${model.id}` });
    return html`<li>
      <span class="name">${model.id}</span>
      <span class="note">${stateParts(model)}${model.pinned && ", pinned"}</span>
      ${
        this.isAdmin &&
        html`<span class="acts">
          ${model.pinned ? action("Unpin", "unpin") : action("Pin", "pin")}
          ${model.state === "loaded" ? action("Unload", "unload") : action("Load", "load")}
        </span>`
      }
    </li>`;
  }
}

function stateParts({ state = "unloaded", progress, error }) {
  if (state === "loading") {
    const text = progress ? `loading, ${Math.round(100 * progress)} %` : "loading";
    return [html`<progress max="1" value=${progress || null} aria-label="Loading"></progress>`, text];
  }
  const text = state === "failed" && error ? `failed to load: ${error}` : STATES[state];
  return [html`<span class=${`dot ${state}`} aria-hidden="true"></span>`, text];
}

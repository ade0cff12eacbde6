// How answers are made: the system prompt, the reasoning preset and a few fields of `overrides`.
// What is left empty is the model's own.

import { choice, element, field, html, offer, quietButton } from "../dom.js";

const KEPT = "kqview-chat-settings";
const PRESET = "reasoning_preset";
const SYSTEM = "system";
// name in overrides -> [label, attributes]
const FIELDS = {
  temperature: ["Temperature", { min: 0, max: 5, step: 0.05 }],
  top_p: ["Top p", { min: 0, max: 1, step: 0.01 }],
  top_k: ["Top k", { min: 0, step: 1 }],
  min_p: ["Min p", { min: 0, max: 1, step: 0.01 }],
  repeat_penalty: ["Repeat penalty", { min: 0, max: 5, step: 0.01 }],
  seed: ["Seed", { min: 0, step: 1 }],
  max_output_tokens: ["Maximum tokens", { min: 1, step: 1 }],
};

export class Settings {
  constructor() {
    this.preset = choice([["", "None"]]);
    this.preset.name = PRESET;
    this.presetField = field("Reasoning preset", this.preset);
    this.presetField.hidden = true;
    this.system = html`<textarea name=${SYSTEM} rows="3" placeholder="the model's own"></textarea>`;
    const number = { type: "number", inputmode: "decimal", placeholder: "default" };
    const fields = Object.entries(FIELDS).map(([name, [label, attributes]]) =>
      field(label, element("input", { ...number, name, ...attributes })),
    );
    const stay = (event) => event.preventDefault();
    this.node = html`<form class="overrides" @input=${() => this.keep()} @submit=${stay}>
      ${field("System prompt", this.system)}
      ${this.presetField}
      <div class="fields">${fields}</div>
      ${quietButton("Use the defaults", () => this.reset(), { type: "button" })}
    </form>`;
    const kept = JSON.parse(sessionStorage.getItem(KEPT) ?? "{}");
    this.keptPreset = kept[PRESET] ?? "";
    this.system.value = kept[SYSTEM] ?? "";
    for (const name of Object.keys(FIELDS)) this.node.elements[name].value = kept[name] ?? "";
  }

  offer(presets) {
    offer(this.preset, [["", "None"], ...presets.map((name) => [name, name])], this.keptPreset);
    this.presetField.hidden = presets.length === 0;
  }

  // What was set, as fields of a request.
  fields() {
    const { [SYSTEM]: system, ...overrides } = this.set();
    return { system, overrides };
  }

  set() {
    const set = [...new FormData(this.node)].filter(([, value]) => value !== "");
    const isText = (name) => name === PRESET || name === SYSTEM;
    return Object.fromEntries(set.map(([name, value]) => [name, isText(name) ? value : Number(value)]));
  }

  keep() {
    this.keptPreset = this.preset.value;
    sessionStorage.setItem(KEPT, JSON.stringify(this.set()));
  }

  reset() {
    this.node.reset();
    this.keep();
  }
}

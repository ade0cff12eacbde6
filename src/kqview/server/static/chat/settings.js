// How answers are made: the reasoning preset and a few fields of `overrides`. What is left empty is
// the model's own.

import { choice, element, field, html, offer, quietButton } from "../dom.js";

const KEPT = "kqview-chat-settings";
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
    this.presetNames = [];
    this.preset = choice([["", "None"]], () => this.keep());
    this.presetField = field("Reasoning preset", this.preset);
    this.presetField.hidden = true;
    this.inputs = Object.fromEntries(
      Object.entries(FIELDS).map(([name, [, attributes]]) => [
        name,
        element("input", {
          type: "number",
          inputmode: "decimal",
          placeholder: "default",
          "@input": () => this.keep(),
          ...attributes,
        }),
      ]),
    );
    const fields = Object.entries(FIELDS).map(([name, [label]]) => field(label, this.inputs[name]));
    this.node = html`<div class="overrides">
      ${this.presetField}
      <div class="fields">${fields}</div>
      ${quietButton("Use the defaults", () => this.reset())}
    </div>`;
    const kept = JSON.parse(sessionStorage.getItem(KEPT) ?? "{}");
    this.keptPreset = kept.reasoning_preset ?? "";
    for (const [name, input] of Object.entries(this.inputs)) input.value = kept[name] ?? "";
  }

  offer(presets) {
    offer(this.preset, [["", "None"], ...presets.map((name) => [name, name])], this.keptPreset);
    this.presetField.hidden = presets.length === 0;
  }

  // What was set, as `overrides` of a request.
  overrides() {
    const set = Object.entries(this.inputs).filter(([, input]) => input.value !== "");
    const found = Object.fromEntries(set.map(([name, input]) => [name, Number(input.value)]));
    if (this.preset.value) found.reasoning_preset = this.preset.value;
    return found;
  }

  keep() {
    this.keptPreset = this.preset.value;
    sessionStorage.setItem(KEPT, JSON.stringify(this.overrides()));
  }

  reset() {
    for (const input of Object.values(this.inputs)) input.value = "";
    this.preset.value = "";
    this.keep();
  }
}

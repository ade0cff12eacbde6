// Moves through the events of a trace, by hand or by itself.

import { button, choice, html, quietButton } from "./dom.js";

const SPEEDS = [5, 20, 100, 500]; // events per second

export class Player {
  // `move(from, to)` is called with indices of events; what is shown is the state after `to`.
  constructor(events, move, signal) {
    this.events = events;
    this.move = move;
    this.at = events.length - 1;
    this.timer = undefined;
    this.range = html`<input type="range" min="0" max=${this.at} value=${this.at} aria-label="Event"
      @input=${() => this.go(Number(this.range.value))}>`;
    this.button = button("", () => (this.timer ? this.stop() : this.play()), { class: "play" });
    const back = quietButton("‹", () => this.step(-1), { "aria-label": "One event back" });
    const on = quietButton("›", () => this.step(1), { "aria-label": "One event on" });
    this.speed = choice(SPEEDS.map((n) => [n, `${n} events/s`]));
    this.speed.value = SPEEDS.find((n) => events.length / n <= 30) ?? SPEEDS.at(-1);
    this.where = html`<output class="note"></output>`;
    this.node = html`<div class="player bar" role="group" aria-label="Playback">
      ${this.button}${back}${on}${this.range}
      <label class="inline">Speed ${this.speed}</label>
      ${this.where}
    </div>`;
    signal.addEventListener("abort", () => this.stop());
    this.stop();
    this.tell();
  }

  go(to) {
    const target = Math.max(0, Math.min(to, this.events.length - 1));
    if (target === this.at) return;
    this.move(this.at, target);
    this.at = target;
    this.tell();
  }

  step(by) {
    this.stop();
    this.go(this.at + by);
  }

  tell() {
    const event = this.events[this.at];
    const text = `${event.event_type} of step ${event.step}, event ${this.at + 1} of ${this.events.length}`;
    this.range.value = this.at;
    this.range.setAttribute("aria-valuetext", text);
    this.where.value = text;
  }

  play() {
    if (this.at === this.events.length - 1) this.go(0);
    this.button.textContent = "Pause";
    let from = performance.now();
    const tick = (now) => {
      const n = Math.floor(((now - from) / 1000) * Number(this.speed.value));
      if (n > 0) {
        from += (n * 1000) / Number(this.speed.value);
        this.go(this.at + n);
      }
      if (this.at === this.events.length - 1) this.stop();
      else this.timer = requestAnimationFrame(tick);
    };
    this.timer = requestAnimationFrame(tick);
  }

  stop() {
    if (this.timer) cancelAnimationFrame(this.timer);
    this.timer = undefined;
    this.button.textContent = "Play";
  }
}

// Figures of one trace: of each token, how tokens came, what mods did and how long they took.

import { count, html, milliseconds, share } from "./dom.js";
import { barList, figure, remark } from "./parts.js";

const WIDTH = 800;
const HEIGHT = 160;
const N_COLUMNS = 200; // of a chart; more tokens share columns

export function metricsView({ timeline, address }) {
  const { tokens, calls, actions } = timeline;
  const sampled = tokens.filter((token) => !token.isForced);
  const erased = tokens.filter((token) => token.died < Infinity);
  const came = [
    ["Sampled", sampled.length],
    ["Forced", tokens.length - sampled.length],
  ];
  const kept = [
    ["Kept", tokens.length - erased.length],
    ["Taken back", erased.length],
  ];
  const probability = ({ probability: value }) => value;
  const entropy = ({ entropy: value }) => value;
  const nats = (value) => value.toFixed(2);
  return {
    node: html`<div class="metrics">
      ${lineChart("Probability of each sampled token", sampled, probability, 1, share, address)}
      ${lineChart("Entropy before each sampled token, in nats", sampled, entropy, undefined, nats, address)}
      <div class="pair">
        ${barChart("How tokens came", came)}
        ${barChart("What became of them", kept)}
        ${barChart("Actions", counted(actions), "No mod did anything.")}
      </div>
      ${modTable(calls)}
    </div>`,
  };
}

function lineChart(title, tokens, of, most, format, address) {
  const points = tokens
    .map((token) => ({ token, value: of(token) }))
    .filter(({ value }) => value !== undefined);
  if (points.length === 0)
    return figure(title, remark("The trace has no probabilities of sampled tokens."));
  const values = points.map(({ value }) => value);
  const mean = values.reduce((a, b) => a + b) / values.length;
  const low = values.reduce((a, b) => Math.min(a, b));
  const high = values.reduce((a, b) => Math.max(a, b));
  const top = most ?? Math.max(high, 1e-9);
  const facts = `mean ${format(mean)}, lowest ${format(low)}, highest ${format(high)}, ${count(values.length, "token")}`;
  const meanY = HEIGHT * (1 - mean / top);
  const chart = html`<svg viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} preserveAspectRatio="none" role="img"
      aria-label=${`${title}: ${facts}`}>
    <line x1="0" x2=${WIDTH} y1=${meanY} y2=${meanY} class="mean"></line>
    <path class="range"></path>
    <path></path>
    <line y1="0" y2=${HEIGHT} class="cursor" visibility="hidden"></line>
  </svg>`;
  const [, range, curve, cursor] = chart.children;
  draw(range, curve, values, top);
  const here = html`<output class="note">${facts}</output>`;
  const pointAt = (event) => {
    const box = chart.getBoundingClientRect();
    const at = Math.floor(((event.clientX - box.left) / box.width) * points.length);
    return points[Math.max(0, Math.min(at, points.length - 1))];
  };
  chart.addEventListener("pointermove", (event) => {
    const point = pointAt(event);
    const x = ((points.indexOf(point) + 0.5) / points.length) * WIDTH;
    cursor.setAttribute("x1", x);
    cursor.setAttribute("x2", x);
    cursor.setAttribute("visibility", "visible");
    here.value = `step ${point.token.step}: ${format(point.value)} ${JSON.stringify(point.token.text ?? point.token.id)}`;
  });
  chart.addEventListener("pointerleave", () => {
    cursor.setAttribute("visibility", "hidden");
    here.value = facts;
  });
  chart.addEventListener("click", (event) => {
    location.hash = address("tokens", pointAt(event).token.step);
  });
  return figure(
    title,
    html`<div class="chart">
      <div class="note" aria-hidden="true"><span>${format(top)}</span><span>0</span></div>
      ${chart}
    </div>`,
    here,
  );
}

// The mean of each column as a line; where several tokens share a column, their range behind it.
function draw(range, curve, values, top) {
  const n_columns = Math.min(values.length, N_COLUMNS);
  const y = (value) => (HEIGHT * (1 - value / top)).toFixed(1);
  const line = [];
  const upper = [];
  const lower = [];
  for (let i = 0; i < n_columns; i++) {
    const some = values.slice(
      Math.floor((i * values.length) / n_columns),
      Math.floor(((i + 1) * values.length) / n_columns),
    );
    const x = (((i + 0.5) / n_columns) * WIDTH).toFixed(1);
    line.push(`${x} ${y(some.reduce((a, b) => a + b) / some.length)}`);
    upper.push(`${x} ${y(Math.max(...some))}`);
    lower.unshift(`${x} ${y(Math.min(...some))}`);
  }
  if (n_columns === 1) line.push(`${WIDTH} ${line[0].split(" ")[1]}`);
  curve.setAttribute("d", `M${line.join("L")}`);
  if (values.length > n_columns) range.setAttribute("d", `M${[...upper, ...lower].join("L")}Z`);
  else range.remove();
}

function barChart(title, rows, none) {
  const most = rows.reduce((a, [, n]) => Math.max(a, n), 0);
  const shown = rows.map(([name, n]) => [name, n, n.toLocaleString("en")]);
  return figure(title, rows.length === 0 ? remark(none) : barList(shown, most));
}

// How many there are of each kind; most calls of most mods return Noop, which would hide the rest.
function counted(actions) {
  const counts = new Map();
  for (const { action_type: kind } of actions) {
    if (kind !== "Noop") counts.set(kind, (counts.get(kind) ?? 0) + 1);
  }
  return [...counts].sort((a, b) => b[1] - a[1]);
}

function modTable(calls) {
  const mods = new Map();
  for (const call of calls) {
    if (!mods.has(call.mod_name)) mods.set(call.mod_name, []);
    mods.get(call.mod_name).push(call);
  }
  if (mods.size === 0) return undefined;
  const rows = [...mods].map(([name, some]) => {
    const times = some
      .map((call) => call.execution_time_ms)
      .filter((ms) => typeof ms === "number")
      .sort((a, b) => a - b);
    const total = times.reduce((a, b) => a + b, 0);
    const at = (part) => times[Math.min(times.length - 1, Math.floor(part * times.length))];
    const cells = [
      some.length,
      milliseconds(total),
      milliseconds(at(0.5)),
      milliseconds(at(0.95)),
      milliseconds(times.at(-1)),
      some.filter((call) => call.exception_occurred).length,
    ];
    return html`<tr><th scope="row">${name}</th>${cells.map((cell) => html`<td>${cell}</td>`)}</tr>`;
  });
  const heads = ["Mod", "Calls", "Total", "Median", "95 %", "Longest", "Exceptions"];
  return html`<figure>
    <figcaption id="mod-times">Time of each mod</figcaption>
    <div class="scroll" tabindex="0" role="region" aria-labelledby="mod-times">
      <table>
        <thead><tr>${heads.map((name) => html`<th scope="col">${name}</th>`)}</tr></thead>
        <tbody>${rows}</tbody>
      </table>
    </div>
  </figure>`;
}

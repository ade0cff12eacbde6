// Tokens whose background says how much attention they got, and the choice of which attention that
// is: of a layer and a head, or their mean.

import { bars, choice, field, html, offer } from "./dom.js";
import { heats, largest } from "./rows.js";

const N_LISTED = 8;

// Elements by the column of a row, with the heat of each; a change of heat is all that is drawn.
export class Coloured {
  // nodesOf(column) gives the elements of a token, undefined if there are none yet.
  constructor(nodesOf) {
    this.nodesOf = nodesOf;
    this.columns = []; // {nodes, heat}
  }

  // Colours the first columns by *heats*, 0 to 10, and the others not at all.
  colour(heats) {
    const n = Math.max(heats.length, this.columns.length);
    for (let i = 0; i < n; i++) {
      const heat = heats[i] ?? 0;
      const one = (this.columns[i] ??= { nodes: undefined, heat: 0 });
      if (one.heat === heat) continue;
      one.nodes ??= this.nodesOf(i);
      if (!one.nodes) continue;
      for (const { classList } of one.nodes) {
        if (one.heat > 0) classList.remove(`heat${one.heat}`);
        if (heat > 0) classList.add(`heat${heat}`);
      }
      one.heat = heat;
    }
  }

  clear() {
    this.colour([]);
    this.columns = [];
  }
}

// Which layer and head are shown, and whether the first token, which most heads rest on, is.
export class RowChoice {
  constructor(onchange) {
    this.onchange = onchange;
    this.layerSelect = choice(numbers(0), () => onchange());
    this.headSelect = choice(numbers(0), () => onchange());
    this.first = html`<input type="checkbox" checked @change=${() => onchange()}>`;
    this.nodes = [
      html`<div class="bar">${field("Layer", this.layerSelect)}${field("Head", this.headSelect)}</div>`,
      html`<label class="inline">${this.first}Leave out the first token</label>`,
    ];
  }

  get layer() {
    return numberOf(this.layerSelect);
  }

  get head() {
    return numberOf(this.headSelect);
  }

  choose(layer, head) {
    this.layerSelect.value = layer ?? "";
    this.headSelect.value = head ?? "";
    this.onchange();
  }

  // Offers the layers and heads that rows have; whether they are others than before.
  offer({ nLayers, nHeads }) {
    if (this.nLayers === nLayers && this.nHeads === nHeads) return false;
    [this.nLayers, this.nHeads] = [nLayers, nHeads];
    for (const [select, n] of [[this.layerSelect, nLayers], [this.headSelect, nHeads]]) {
      offer(select, numbers(n));
      select.disabled = n < 2;
    }
    return true;
  }

  // A copy of *weights* to be shown.
  shown(weights) {
    const copy = weights.slice();
    if (this.first.checked && copy.length > 0) copy[0] = 0;
    return copy;
  }
}

const numberOf = ({ value }) => (value === "" ? undefined : Number(value));

// The mean, and numbers to choose from if there are several.
const numbers = (n) => [["", "Mean of all"], ...Array.from({ length: n > 1 ? n : 0 }, (_, i) => [i, i])];

// Colours the tokens of *view* by *weights*, with a legend, and lists the columns with the largest
// ones, which nameOf(column) names.
export function colourAndList({ choice, coloured, legend, listed }, weights, nameOf) {
  const shown = choice.shown(weights);
  const top = largest(shown, N_LISTED);
  const most = top[0]?.[1] ?? 0;
  coloured.colour(heats(shown, most));
  legend.replaceChildren(...scale(most));
  const named = top.map(([column, weight]) => [nameOf(column), weight, percent(weight)]);
  listed.replaceChildren(...bars(named, most));
}

// Moves the focus within *nodes*, of which *at* has it, as the key of *event* says.
export function moveFocus(event, nodes, at) {
  const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: nodes.length - 1 }[event.key];
  const node = nodes[to];
  if (!node) return;
  event.preventDefault();
  nodes[at].tabIndex = -1;
  node.tabIndex = 0;
  node.focus();
}

// A scale from no colour to the hottest, which is *most*.
function scale(most) {
  return most > 0 ? ["0", html`<span class="scale"></span>`, percent(most)] : [];
}

function percent(weight) {
  const value = 100 * weight;
  return `${value < 10 ? value.toFixed(1) : Math.round(value)} %`;
}

// The text of a token with something to see in it: line ends as signs.
export const visible = (text) => text.replace(/\n/g, "↵\n") || "·";

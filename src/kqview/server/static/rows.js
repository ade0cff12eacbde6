// Rows of attention: for one token, how much each head of each layer looked at each column, which
// are the tokens before it.

// A row of shape [layers, heads, columns], [layers, columns] or [columns]; *values* are float32, or
// the bits of float16 in a Uint16Array.
export class Row {
  constructor(shape, values) {
    this.nColumns = shape.at(-1);
    this.nLayers = shape.length > 1 ? shape[0] : 1;
    this.nHeads = shape.length > 2 ? shape[1] : 1;
    this.values = values;
  }

  get nBytes() {
    return this.values.byteLength;
  }

  // The mean over the chosen layers and heads, undefined for all, as float32. *sum* is added to if
  // it is given; it may be longer.
  mean(layer, head, sum = new Float32Array(this.nColumns)) {
    const { nColumns, nHeads, values } = this;
    const toNumber = values instanceof Uint16Array ? float16s() : undefined;
    const layers = layer === undefined ? range(this.nLayers) : [Math.min(layer, this.nLayers - 1)];
    const heads = head === undefined ? range(nHeads) : [Math.min(head, nHeads - 1)];
    const part = 1 / (layers.length * heads.length);
    for (const l of layers) {
      for (const h of heads) {
        const start = (l * nHeads + h) * nColumns;
        for (let i = 0; i < nColumns; i++) {
          const value = values[start + i];
          sum[i] += part * (toNumber ? toNumber[value] : value);
        }
      }
    }
    return sum;
  }

  // The largest share that each head of each layer gives to one token, but for the first one.
  peaks() {
    const { nColumns, values } = this;
    const toNumber = values instanceof Uint16Array ? float16s() : undefined;
    return Float32Array.from({ length: this.nLayers * this.nHeads }, (_, at) => {
      let most = 0;
      for (let i = at * nColumns + 1; i < (at + 1) * nColumns; i++) {
        most = Math.max(most, toNumber ? toNumber[values[i]] : values[i]);
      }
      return most;
    });
  }
}

const range = (n) => Array.from({ length: n }, (_, i) => i);

let table;

// The numbers of all float16 bits.
function float16s() {
  if (table) return table;
  table = new Float32Array(65536);
  for (let bits = 0; bits < 65536; bits++) {
    const exponent = (bits >> 10) & 31;
    const fraction = bits & 1023;
    const size =
      exponent === 0 ? fraction * 2 ** -24 : (1 + fraction / 1024) * 2 ** (exponent - 15);
    table[bits] = (bits & 0x8000 ? -1 : 1) * (exponent === 31 ? NaN : size);
  }
  return table;
}

// How hot each weight is, 0 to 10 as in the classes of base.css; *most* is as hot as it gets.
// The root makes small weights visible.
export function heats(weights, most) {
  return Uint8Array.from(weights, (weight) =>
    weight > 0 && most > 0 ? Math.min(10, Math.round(10 * Math.sqrt(weight / most))) : 0,
  );
}

// The columns with the largest weights, largest first: [column, weight].
export function largest(weights, n) {
  const found = [];
  for (let i = 0; i < weights.length; i++) {
    if (weights[i] <= 0 || (found.length === n && weights[i] <= found[n - 1][1])) continue;
    let at = found.length;
    while (at > 0 && found[at - 1][1] < weights[i]) at--;
    found.splice(at, 0, [i, weights[i]]);
    if (found.length > n) found.pop();
  }
  return found;
}

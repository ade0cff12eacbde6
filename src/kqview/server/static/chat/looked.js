// What one answer looked at: its prompt's tokens and the rows of attention that were fetched, each
// once. A sum over the rows is kept up to date for the layer and head that are shown.

import { Row } from "../rows.js";
import { fetchPrompt, fetchRow } from "./api.js";

const MOST_BYTES = 2 ** 26; // of rows of one answer; the oldest leave
const N_OF_WHOLE = 256; // rows that stand for a whole answer, however long it is

export class Looked {
  // onchange is called when there is something new to show.
  constructor(requestId, onchange) {
    this.requestId = requestId;
    this.nPrompt = undefined; // tokens of the prompt, known with the first row
    this.onchange = onchange;
    this.marks = []; // of tokens, in their order
    this.byIndex = new Map();
    this.peakSum = []; // over all rows that came
    this.nPeaks = 0;
    this.rows = new Map(); // index -> Row, or a promise of one
    this.nBytes = 0;
    this.layer = this.head = undefined;
    this.isWhole = false; // whether the answer has ended
    this.forget();
  }

  get newest() {
    return this.marks.at(-1);
  }

  add(mark) {
    this.marks.push(mark);
    this.byIndex.set(mark.index, mark);
    this.follow();
  }

  end() {
    this.isWhole = true;
    this.follow();
  }

  // The texts of the prompt's tokens.
  prompt() {
    this.texts ??= fetchPrompt(this.requestId).then(({ texts }) => texts);
    return this.texts;
  }

  show(layer, head) {
    [this.layer, this.head] = [layer, head];
    this.forget();
    for (const [index, row] of this.rows) if (row instanceof Row) this.count(index, row);
  }

  forget() {
    this.sum = new Float32Array(0);
    this.counted = new Set();
  }

  count(index, row) {
    if (this.counted.has(index)) return;
    this.counted.add(index);
    if (row.nColumns > this.sum.length) {
      const longer = new Float32Array(Math.max(2 * this.sum.length, row.nColumns + 64));
      longer.set(this.sum);
      this.sum = longer;
    }
    row.mean(this.layer, this.head, this.sum);
  }

  // What the prompt got of the tokens that were counted, in the mean.
  mean() {
    return this.sum.subarray(0, this.nPrompt ?? 0).map((value) => value / this.counted.size);
  }

  // As of a row, in the mean of those that came.
  peaks() {
    return Float32Array.from(this.peakSum, (sum) => sum / this.nPeaks);
  }

  // The row of a token, fetched if need be.
  row(mark) {
    const known = this.rows.get(mark.index);
    if (known) return Promise.resolve(known);
    const coming = fetchRow(mark.path).then(
      ({ shape, values }) => this.keep(mark, new Row(shape, values)),
      (error) => {
        this.rows.delete(mark.index);
        throw error;
      },
    );
    this.rows.set(mark.index, coming);
    return coming;
  }

  keep(mark, row) {
    this.nPrompt = row.nColumns - mark.index;
    this.rows.set(mark.index, row);
    this.nBytes += row.nBytes;
    for (const [index, old] of this.rows) {
      if (this.nBytes <= MOST_BYTES) break;
      if (!(old instanceof Row) || old === row) continue;
      this.rows.delete(index);
      this.nBytes -= old.nBytes;
    }
    row.peaks().forEach((peak, i) => (this.peakSum[i] = (this.peakSum[i] ?? 0) + peak));
    this.nPeaks += 1;
    this.count(mark.index, row);
    this.onchange();
    return row;
  }

  // Fetches rows one after the other: the newest while the answer comes, then some of all parts.
  async follow() {
    if (this.isFollowing) return;
    this.isFollowing = true;
    try {
      for (let mark = this.next(); mark; mark = this.next()) await this.row(mark);
    } catch (error) {
      this.failed = error;
      this.onchange();
    } finally {
      this.isFollowing = false;
    }
  }

  next() {
    if (this.failed || this.counted.size >= N_OF_WHOLE * (this.isWhole ? 1 : 4)) return undefined;
    if (!this.isWhole) return this.counted.has(this.newest?.index) ? undefined : this.newest;
    const step = Math.max(1, this.marks.length / N_OF_WHOLE);
    for (let at = 0; at < this.marks.length; at += step) {
      const mark = this.marks[Math.floor(at)];
      if (!this.counted.has(mark.index) && !this.rows.has(mark.index)) return mark;
    }
    return undefined;
  }
}

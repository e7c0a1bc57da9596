// A heat map of instances by time: a canvas with one pixel for each value, which the browser scales up, and a cursor.

import { el, setText } from "./dom.js";
import { round, timeOf } from "./curves.js";

// Number of colour classes.
const CLASSES = 6;
// Height of the map, minimum and maximum height of a row, and height of a row with a name, px. High rows are easier to hit, but a thousand
// rows must fit on a few screens.
const HEIGHT_PX = 560, LEAST_ROW_PX = 3, TALLEST_ROW_PX = 18, NAMED_ROW_PX = 12;

/** Upper bounds of the colour classes for values up to `most`. Scale: "share" (fixed bounds), "even" (linear) or "log". */
function bounds(most, scale) {
  if (scale === "share") return [0.2, 0.4, 0.6, 0.8, 0.95, 1];
  const top = round(most);
  if (scale === "even") return [1, 2, 3, 4, 5, 6].map((part) => (top * part) / CLASSES);
  const steps = [top];
  while (steps.length < CLASSES) steps.unshift(round(steps[0] * 0.4));
  return steps;
}

export class HeatMap {
  /** `open(row)` is called when a row is clicked, or when Enter is pressed with the cursor on the row. */
  constructor(open) {
    this.open = open;
    this.rows = [];
    this.row = this.column = -1;
    this.swatches = Array.from({ length: CLASSES }, (_, number) => el("i", { className: "heat", "data-heat": String(number) }));
    this.labels = this.swatches.map(() => el("span", {}));
    this.legend = el("p", { className: "legend" }, ...this.swatches.map((swatch, number) => el("span", {}, swatch, this.labels[number])), el("span", {}, el("i", { className: "heat unknown" }), "unknown"));
    this.canvas = el("canvas", { "aria-hidden": "true" });
    this.mark = el("div", { className: "mark", hidden: true });
    this.names = el("div", { className: "names", "aria-hidden": "true" });
    this.grid = el("div", {
      className: "cells", tabIndex: 0, role: "application", "aria-roledescription": "heat map",
      onkeydown: (event) => this.#keyed(event),
      onpointermove: (event) => this.#point(...this.#at(event)),
      onpointerleave: () => this.grid.matches(":focus-visible") || this.#point(-1, -1),
      onblur: () => this.#point(-1, -1),
      onclick: (event) => this.rows.length && this.open(this.rows[this.#at(event)[0]]),
    }, this.canvas, this.mark);
    this.readout = el("output", { className: "readout", "aria-live": "polite" });
    this.axis = el("div", { className: "axis", "aria-hidden": "true" }, ...["−15 min", "−10 min", "−5 min", "now"].map((text) => el("span", {}, text)));
    this.element = el("div", { hidden: true }, this.legend, el("div", { className: "map" }, this.names, this.grid, this.axis), this.readout);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#draw());
  }

  /** Show rows {id, values}. Each has one value for each of `columns` steps of `step` ms from `from` (ms) on; NaN: unknown. */
  update(rows, { from, step, columns, scale, show, label }) {
    // The cursor stays in its row and at its time while the map moves on, until that is the oldest time.
    const before = this.rows[this.row]?.id, left = this.column - Math.round((from - this.from) / step);
    Object.assign(this, { rows, from, step, columns, show });
    const most = rows.reduce((high, { values }) => values.reduce((a, b) => (b > a ? b : a), high), 0);
    this.bounds = bounds(most, scale);
    this.labels.forEach((label, number) => setText(label, `up to ${show(this.bounds[number])}`));
    this.height = Math.min(Math.max(Math.floor(HEIGHT_PX / Math.max(rows.length, 1)), LEAST_ROW_PX), TALLEST_ROW_PX);
    this.grid.setAttribute("aria-label", `${label}. ${rows.length} instances by the last 15 minutes. Arrow keys move, Enter opens the instance; the table below has the same values.`);
    this.element.hidden = !rows.length;
    this.#draw();
    this.#name();
    const row = rows.findIndex(({ id }) => id === before);
    this.#point(row, row < 0 ? -1 : Math.max(left, 0));
  }

  #draw() {
    if (!this.columns || !this.rows.length) return;
    const colours = this.swatches.map((swatch) => getComputedStyle(swatch).backgroundColor.match(/\d+/g).slice(0, 3).map(Number));
    this.canvas.width = this.columns;
    this.canvas.height = this.rows.length;
    const pen = this.canvas.getContext("2d");
    const image = pen.createImageData(this.columns, this.rows.length);
    let pixel = 0;
    for (const { values } of this.rows) {
      for (const value of values) {
        // Unknown values stay transparent, so that the background pattern is visible.
        if (Number.isFinite(value)) {
          image.data.set(colours[this.#class(value)], pixel);
          image.data[pixel + 3] = 255;
        }
        pixel += 4;
      }
    }
    pen.putImageData(image, 0, 0);
    this.grid.style.setProperty("height", `${this.rows.length * this.height}px`);
  }

  #class(value) {
    let number = 0;
    while (number < CLASSES - 1 && value > this.bounds[number]) number += 1;
    return number;
  }

  #name() {
    const every = Math.ceil(NAMED_ROW_PX / this.height);
    const names = this.rows.filter((_, row) => row % every === 0).map(({ id }) => id);
    if (this.named === `${every} ${names.join(" ")}`) return;
    this.named = `${every} ${names.join(" ")}`;
    this.names.replaceChildren(...names.map((name) => {
      const line = el("div", {}, name);
      line.style.setProperty("height", `${every * this.height}px`);
      return line;
    }));
  }

  #point(row, column) {
    [this.row, this.column] = [row, column];
    const on = row >= 0 && column >= 0;
    this.mark.hidden = !on;
    if (!on) {
      setText(this.readout, "Point at a cell, or use the arrow keys, to read its value.");
      return;
    }
    const { id, values } = this.rows[row];
    const value = values[column];
    this.mark.style.setProperty("left", `${(column / this.columns) * 100}%`);
    this.mark.style.setProperty("width", `${100 / this.columns}%`);
    this.mark.style.setProperty("top", `${row * this.height}px`);
    this.mark.style.setProperty("height", `${this.height}px`);
    setText(this.readout, `${id} from ${timeOf(this.from + column * this.step)} on: ${Number.isFinite(value) ? this.show(value) : "unknown"}`);
  }

  #at(event) {
    const { left, top, width } = this.grid.getBoundingClientRect();
    const limited = (value, end) => Math.min(Math.max(Math.floor(value), 0), end - 1);
    return [limited((event.clientY - top) / this.height, this.rows.length), limited(((event.clientX - left) / width) * this.columns, this.columns)];
  }

  #keyed(event) {
    if (!this.rows.length || !this.columns) return;
    const last = [this.rows.length - 1, this.columns - 1];
    const [row, column] = this.row < 0 ? [0, last[1]] : [this.row, this.column];
    if (event.key === "Enter") {
      event.preventDefault();
      this.open(this.rows[row]);
      return;
    }
    const page = Math.max(Math.floor(HEIGHT_PX / 2 / this.height), 1);
    const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], PageUp: [-page, 0], PageDown: [page, 0], Home: [0, -last[1]], End: [0, last[1]] };
    if (!steps[event.key]) return;
    event.preventDefault();
    // The first key press only shows the cursor.
    const [down, right] = this.row < 0 ? [0, 0] : steps[event.key];
    this.#point(Math.min(Math.max(row + down, 0), last[0]), Math.min(Math.max(column + right, 0), last[1]));
    this.mark.scrollIntoView({ block: "nearest" });
  }
}

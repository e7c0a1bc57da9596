// A small chart of a few curves over the last minutes: SVG created by DOM calls, and a cursor for mouse and keyboard.

import { el, setText } from "./dom.js";
import { clock } from "./format.js";

const WIDTH = 420, HEIGHT = 150;
const LEFT = 58, RIGHT = 8, TOP = 8, BOTTOM = 20;
const NS = "http://www.w3.org/2000/svg";
let charts = 0;

function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS(NS, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** The smallest of 1, 2, 5, 10, 20, ... (and 0.5, 0.2, ...) that is not below `value`; 1 for values up to 0. */
export function round(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value * 0.9999);
}

/** {newest, least, most} of a series, in which unknown values are NaN; undefined if no value is known. */
export function summed(values) {
  const known = values.filter(Number.isFinite);
  if (!known.length) return undefined;
  return { newest: values.at(-1), least: known.reduce((a, b) => Math.min(a, b)), most: known.reduce((a, b) => Math.max(a, b)) };
}

/**
 * A chart of curves: {title, hint, show(value), top (end of the scale; default: from the values), lines: [{name, measure}]}.
 * The second line is dashed, so that the lines differ without colours. `moved(index)` is called when the user moves the cursor.
 */
export class Curves {
  constructor({ title, hint, show, top, lines }, moved) {
    Object.assign(this, { title, show, top, lines, index: -1, times: [], values: lines.map(() => []) });
    const id = `curves-${(charts += 1)}`;
    this.grid = svg("g", { class: "grid" });
    this.before = svg("rect", { class: "before", x: LEFT, y: TOP, width: 0, height: HEIGHT - TOP - BOTTOM });
    this.start = svg("text", { x: LEFT + 5, y: HEIGHT - BOTTOM - 6 }, "before its start");
    this.paths = lines.map((_, number) => svg("path", { class: "curve", "data-line": number }));
    this.rule = svg("line", { class: "rule", y1: TOP, y2: HEIGHT - BOTTOM, hidden: "" });
    this.dots = lines.map((_, number) => svg("circle", { class: "dot", "data-line": number, r: 3, hidden: "" }));
    this.picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" }, this.before, this.start, this.grid, ...this.paths, this.rule, ...this.dots);
    this.figures = lines.map(() => el("b", {}));
    this.time = el("span", { className: "muted" });
    const keys = lines.map(({ name }, number) => el("span", { className: "key" }, svg("svg", { class: "sample", viewBox: "0 0 22 8", "aria-hidden": "true" }, svg("path", { class: "curve", "data-line": number, d: "M1 4H21" })), name, " ", this.figures[number]));
    this.cursor = el("div", {
      className: "cursor", tabIndex: 0, role: "slider", "aria-label": `${title}, point in time`, "aria-valuemin": "0",
      onkeydown: (event) => this.#keyed(event, moved),
      onpointermove: (event) => moved(this.#at(event)),
      onpointerleave: () => this.cursor.matches(":focus-visible") || moved(-1),
      onblur: () => moved(-1),
    });
    this.element = el(
      "figure", { className: "curves", "aria-labelledby": id },
      el("figcaption", {}, el("h2", { id, title: hint }, title), this.time, el("span", { className: "keys" }, ...keys)),
      el("div", { className: "plot" }, this.picture, this.cursor),
    );
  }

  /** Show values: one list for each line. `times`: the begins of their steps, ms. The chart shows the time from `from` to `to`, ms. */
  update(times, values, { from, to, step, seen }) {
    const here = this.times[this.index];
    // The cursor stays at its time while the chart moves on, until that is the oldest time.
    const index = here === undefined ? -1 : Math.max(times.findIndex((time) => Math.abs(time - here) < step / 2), 0);
    Object.assign(this, { times, values, step, index });
    const most = values.map(summed).reduce((high, sum) => Math.max(high, sum?.most ?? 0), 0);
    const top = this.top ?? round(most);
    this.x = (time) => LEFT + ((time - from) / (to - from)) * (WIDTH - LEFT - RIGHT);
    this.y = (value) => HEIGHT - BOTTOM - (Math.min(value, top) / top) * (HEIGHT - TOP - BOTTOM);
    this.#draw(top, from, to, seen);
    this.picture.setAttribute("aria-label", this.#summary());
    this.cursor.setAttribute("aria-valuemax", String(Math.max(times.length - 1, 0)));
    this.point(this.index);
  }

  /** Move the cursor to a step. With -1 there is no cursor, and the legend shows the newest values. */
  point(index) {
    this.index = index < this.times.length ? index : -1;
    const on = this.index >= 0;
    const shown = on ? this.index : this.times.length - 1;
    const x = on ? this.x(this.times[shown] + this.step / 2) : 0;
    this.rule.toggleAttribute("hidden", !on);
    this.rule.setAttribute("x1", x);
    this.rule.setAttribute("x2", x);
    this.lines.forEach((_, number) => {
      const value = this.values[number][shown];
      const dot = this.dots[number];
      dot.toggleAttribute("hidden", !on || !Number.isFinite(value));
      if (on && Number.isFinite(value)) {
        dot.setAttribute("cx", x);
        dot.setAttribute("cy", this.y(value));
      }
      setText(this.figures[number], this.#text(value));
    });
    setText(this.time, on ? timeOf(this.times[shown]) : "");
    this.cursor.setAttribute("aria-valuenow", String(Math.max(shown, 0)));
    this.cursor.setAttribute("aria-valuetext", shown < 0 ? "no values" : `${timeOf(this.times[shown])}: ${this.lines.map(({ name }, number) => `${name} ${this.#text(this.values[number][shown])}`).join(", ")}`);
  }

  #text(value) {
    return Number.isFinite(value) ? this.show(value) : "–";
  }

  #summary() {
    const parts = this.lines.map(({ name }, number) => {
      const sum = summed(this.values[number]);
      return sum ? `${name}: now ${this.#text(sum.newest)}, ${this.show(sum.least)} to ${this.show(sum.most)}` : `${name}: no values`;
    });
    return `${this.title} over the last 15 minutes. ${parts.join(". ")}.`;
  }

  #draw(top, from, to, seen) {
    const bottom = HEIGHT - BOTTOM;
    const lines = [];
    for (const share of [0, 0.5, 1]) {
      const y = this.y(top * share);
      lines.push(svg("line", { x1: LEFT, x2: WIDTH - RIGHT, y1: y, y2: y }), svg("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" }, this.show(top * share)));
    }
    const minutes = Math.round((to - from) / 60000);
    for (let ago = 0; ago <= minutes; ago += 5) {
      const x = this.x(to - ago * 60000);
      const anchor = ago === 0 ? "end" : ago === minutes ? "start" : "middle";
      lines.push(svg("line", { x1: x, x2: x, y1: bottom, y2: bottom + 4 }), svg("text", { x, y: HEIGHT - 5, "text-anchor": anchor }, ago ? `−${ago} min` : "now"));
    }
    this.grid.replaceChildren(...lines);
    const width = Math.max(Math.min(this.x(seen), WIDTH - RIGHT) - LEFT, 0);
    this.before.setAttribute("width", width);
    this.start.toggleAttribute("hidden", width < 90);
    this.values.forEach((values, number) => this.paths[number].setAttribute("d", this.#path(values)));
  }

  /** The path of a curve. Unknown values interrupt it; a single known value becomes a point. */
  #path(values) {
    let d = "";
    values.forEach((value, index) => {
      if (!Number.isFinite(value)) return;
      const x = this.x(this.times[index] + this.step / 2).toFixed(1), y = this.y(value).toFixed(1);
      const goesOn = Number.isFinite(values[index - 1]);
      d += goesOn ? `L${x} ${y}` : `M${x} ${y}${Number.isFinite(values[index + 1]) ? "" : "h.01"}`;
    });
    return d;
  }

  #at(event) {
    const { left, width } = this.cursor.getBoundingClientRect();
    const x = ((event.clientX - left) / width) * WIDTH;
    const index = this.times.findIndex((time) => this.x(time + this.step) >= x);
    return index < 0 ? this.times.length - 1 : index;
  }

  #keyed(event, moved) {
    const end = this.times.length - 1;
    const here = this.index < 0 ? end : this.index;
    const next = { ArrowLeft: here - 1, ArrowDown: here - 1, ArrowRight: here + 1, ArrowUp: here + 1, PageDown: here - 12, PageUp: here + 12, Home: 0, End: end }[event.key];
    if (next === undefined || end < 0) return;
    event.preventDefault();
    moved(Math.min(Math.max(next, 0), end));
  }
}

/** A time (ms) as HH:MM:SS. */
export function timeOf(ms) {
  return clock(new Date(ms)).slice(0, 8);
}

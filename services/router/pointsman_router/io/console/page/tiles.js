// A row of figures, each with its name above and a note below: the summary at the top of a view.

import { el, setText } from "./dom.js";

export class Tiles {
  constructor() {
    this.element = el("dl", { className: "tiles" });
    this.parts = new Map();
  }

  /** [name, value, note, tone, filter]: `filter` makes the name a link to the fleet's instances that match it. */
  update(rows) {
    for (const [name, value, note = "", tone = "", filter = ""] of rows) {
      let part = this.parts.get(name);
      if (!part) {
        part = { value: el("span", {}), note: el("small", {}) };
        this.parts.set(name, part);
        const title = filter ? el("a", { href: `#/fleet?filter=${filter}`, title: "Show these instances" }, name) : name;
        this.element.append(el("div", {}, el("dt", {}, title), el("dd", {}, part.value, part.note)));
      }
      setText(part.value, value);
      setText(part.note, note);
      part.value.dataset.tone = tone;
    }
  }
}

// A table with sorting, filtering and pages. Its rows are updated in place.

import { el, setText } from "./dom.js";

// Forms of a column: figures (`num`), long text that wraps (`wrap`), an `address` or `name` that may break anywhere if there is no room,
// `words` that may break between words, and text that is cut with an ellipsis (`short`), whose note has the whole text.
const FORMS = ["num", "wrap", "address", "name", "words", "short"];

/**
 * A table. Columns: {id, title, unit, hint, any of FORMS, pill, value(row), text(row), href(row), share(row) 0 to 1, tone(row), note(row),
 * shown(rows)}. Rows are sorted by `value`; cells show `text` (default: the value). A column is hidden if `shown` returns false.
 */
export class Table {
  /** `address`: {query, keep(changes)}, if the order is kept in the page's address, as "sort=kv" or "sort=-kv" (descending). */
  constructor({ label, columns, key, sort = null, pageSize = 100, empty = "Nothing yet.", tone, narrow = false, address = null }) {
    Object.assign(this, { columns, key, sort, pageSize, emptyText: empty, rowTone: tone, address, page: 0, all: [], rows: new Map() });
    const [, down, id] = /^(-?)(.*)$/.exec(address?.query.get("sort") ?? "");
    if (columns.some((column) => column.id === id)) this.sort = { id, down: down === "-" };
    this.heads = columns.map((column) => this.#head(column));
    this.body = el("tbody", { onkeydown: (event) => this.#arrows(event) });
    this.empty = el("p", { className: "empty" }, "Waiting for the router …");
    this.range = el("span", { className: "muted" });
    this.before = el("button", { type: "button", className: "quiet", onclick: () => this.#turn(-1) }, "Previous");
    this.after = el("button", { type: "button", className: "quiet", onclick: () => this.#turn(1) }, "Next");
    this.pager = el("div", { className: "pager", role: "group", "aria-label": `Pages of ${label}` }, this.before, this.range, this.after);
    const table = el("table", {}, el("caption", { className: "unseen" }, label), el("thead", {}, el("tr", {}, ...this.heads)), this.body);
    this.scroll = el("div", { className: "scroll", role: "region", "aria-label": label, tabIndex: 0 }, table);
    this.element = el("div", { className: narrow ? "table narrow" : "table" }, this.scroll, this.empty, this.pager);
    this.#showSort();
    this.pager.hidden = true;
  }

  /** Show the rows for which `matches` returns true. */
  update(rows, matches = () => true) {
    this.all = rows;
    this.matches = matches;
    this.#render();
  }

  get matching() {
    return this.shown?.length ?? 0;
  }

  #head(column) {
    const title = [column.title, column.unit ? el("span", { className: "unit" }, ` ${column.unit}`) : undefined];
    const sortable = column.value && column.sortable !== false;
    const inner = sortable ? [el("button", { type: "button", title: column.hint, onclick: () => this.#sortBy(column) }, ...title)] : title;
    return el("th", { scope: "col", className: column.num ? "num" : "", title: sortable ? undefined : column.hint }, ...inner);
  }

  #sortBy(column) {
    const same = this.sort?.id === column.id;
    // The first click sorts figures in descending order and names in ascending order.
    this.sort = { id: column.id, down: same ? !this.sort.down : Boolean(column.num) };
    this.page = 0;
    this.address?.keep({ sort: `${this.sort.down ? "-" : ""}${column.id}` });
    this.#showSort();
    this.#render();
  }

  #showSort() {
    this.columns.forEach((column, index) => {
      if (this.sort?.id === column.id) this.heads[index].setAttribute("aria-sort", this.sort.down ? "descending" : "ascending");
      else this.heads[index].removeAttribute("aria-sort");
    });
  }

  #turn(by) {
    this.page += by;
    this.#render();
    this.scroll.scrollTop = 0;
  }

  #sorted(rows) {
    const column = this.columns.find((column) => column.id === this.sort?.id);
    if (!column) return rows;
    const sign = this.sort.down ? -1 : 1;
    const keyed = rows.map((row) => [column.value(row), row]);
    const order = (a, b) => (typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : (a ?? -Infinity) - (b ?? -Infinity));
    // Unknown values are last in both orders.
    return keyed.sort(([a], [b]) => (a === undefined) - (b === undefined) || sign * order(a, b)).map(([, row]) => row);
  }

  #render() {
    this.shown = this.#sorted(this.all.filter(this.matches));
    const pages = Math.max(Math.ceil(this.shown.length / this.pageSize), 1);
    this.page = Math.min(Math.max(this.page, 0), pages - 1);
    const from = this.page * this.pageSize;
    const visible = this.shown.slice(from, from + this.pageSize);
    const focused = this.body.contains(document.activeElement) ? document.activeElement : null;
    const kept = new Set();
    let place = this.body.firstChild;
    for (const row of visible) {
      const key = this.key(row);
      kept.add(key);
      let line = this.rows.get(key);
      if (!line) this.rows.set(key, (line = this.#line()));
      this.#fill(line, row);
      if (place === line.element) place = place.nextSibling;
      else this.body.insertBefore(line.element, place);
    }
    for (const [key, line] of this.rows) {
      if (kept.has(key)) continue;
      line.element.remove();
      this.rows.delete(key);
    }
    // Restore the focus, which a row loses when it is moved.
    if (focused && document.activeElement !== focused) (focused.isConnected ? focused : this.scroll).focus({ preventScroll: true });
    setText(this.empty, this.all.length ? "Nothing matches the filter." : this.emptyText);
    this.empty.hidden = visible.length > 0;
    this.#showColumns();
    this.pager.hidden = pages === 1;
    this.before.disabled = this.page === 0;
    this.after.disabled = this.page === pages - 1;
    setText(this.range, `${from + 1}–${from + visible.length} of ${this.shown.length}`);
  }

  #showColumns() {
    this.columns.forEach(({ shown }, index) => {
      if (!shown) return;
      const hidden = !shown(this.all);
      this.heads[index].hidden = hidden;
      for (const { cells } of this.rows.values()) cells[index].cell.hidden = hidden;
    });
  }

  #line() {
    const cells = this.columns.map((column, index) => {
      const inner = column.href ? el("a", { className: "id" }) : column.pill ? el("span", { className: "pill" }) : column.share ? el("span", { className: "share" }) : null;
      const cell = el(index === 0 ? "th" : "td", { className: FORMS.filter((form) => column[form]).join(" "), scope: index === 0 ? "row" : undefined });
      if (inner) cell.append(inner);
      return { cell, inner: inner ?? cell };
    });
    return { cells, element: el("tr", {}, ...cells.map(({ cell }) => cell)) };
  }

  #fill(line, row) {
    line.element.dataset.tone = this.rowTone?.(row) ?? "";
    this.columns.forEach((column, index) => {
      const { cell, inner } = line.cells[index];
      setText(inner, String((column.text ?? column.value)(row) ?? "–"));
      if (column.tone) inner.dataset.tone = column.tone(row) ?? "";
      if (column.note) cell.title = column.note(row) ?? "";
      if (column.share) inner.style.setProperty("--share", `${Math.min(Math.max(column.share(row) ?? 0, 0), 1) * 100}%`);
      if (column.href) {
        const href = column.href(row);
        if (!href) inner.removeAttribute("href");
        else if (inner.getAttribute("href") !== href) inner.setAttribute("href", href);
      }
    });
  }

  #arrows(event) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step || !(event.target instanceof HTMLAnchorElement)) return;
    const column = [...event.target.closest("tr").cells].indexOf(event.target.closest("th, td"));
    const next = step > 0 ? event.target.closest("tr").nextElementSibling : event.target.closest("tr").previousElementSibling;
    const target = next?.cells[column]?.querySelector("a");
    if (!target) return;
    event.preventDefault();
    target.focus();
  }
}

/** For a column's `shown`: hides a column whose values are all the same. */
export const varied = (get) => (rows) => rows.some((row) => get(row) !== get(rows[0]));

/** The words of a filter, each of which a row must have. */
export const wordsOf = (text) => text.toLowerCase().split(/\s+/).filter(Boolean);

/** A filter box. Calls `changed` with its text 150 ms after the last input. */
export function filterBox(placeholder, changed) {
  let later;
  return el("input", {
    type: "search",
    className: "filter",
    placeholder,
    "aria-label": placeholder,
    spellcheck: false,
    autocomplete: "off",
    oninput: (event) => {
      clearTimeout(later);
      // Not for a view that was left in the meantime.
      later = setTimeout(() => event.target.isConnected && changed(event.target.value), 150);
    },
  });
}

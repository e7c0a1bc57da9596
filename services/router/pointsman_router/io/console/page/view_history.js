// The last 15 minutes as this router has seen them: curves of one pool or of the total, and a heat map of instances.

import { Curves, summed, timeOf } from "./curves.js";
import { el, setText } from "./dom.js";
import { count, num, percent, seconds, span } from "./format.js";
import { HeatMap } from "./heat_map.js";
import { filterBox, Table, wordsOf } from "./table.js";
import { instanceHref } from "./view_fleet.js";

const perSecond = (value) => `${value < 10 ? Number(value.toFixed(2)) : count(value)} /s`;
const share = (value) => `${percent(value)} %`;
const names = new Intl.Collator("en", { numeric: true });
const some = (value) => (value < 10 ? String(Number(value.toFixed(1))) : count(value));
const thousands = (value) => (value >= 10000 ? `${count(value / 1000)}k tok` : `${count(value)} tok`);

const CHARTS = [
  { title: "Time to first token", hint: "Of requests that ended in the step, measured at their gateways", show: span, lines: [{ name: "median", measure: "TTFT_P50" }, { name: "p90", measure: "TTFT_P90" }] },
  { title: "Requests", hint: "Placements and refusals per second", show: perSecond, lines: [{ name: "placed", measure: "PLACEMENTS" }, { name: "refused", measure: "REFUSALS" }] },
  { title: "Prefix hits", hint: "Share of the prompts' tokens that were cached, as predicted at the placement and as reported by engines at the end", show: share, top: 1, lines: [{ name: "predicted", measure: "PREDICTED_HITS" }, { name: "reported", measure: "REPORTED_HITS" }] },
  { title: "Held requests", hint: "Requests that wait in the router for a placement", show: some, lines: [{ name: "held", measure: "HELD_REQUESTS" }] },
  { title: "Open requests", hint: "Requests placed and not finished", show: some, lines: [{ name: "open", measure: "OPEN_REQUESTS" }] },
  { title: "To prefill", hint: "Prompt tokens placed and not computed yet", show: thousands, lines: [{ name: "pending", measure: "PENDING_PREFILL_TOKENS" }] },
  { title: "Backlog", hint: "How long a new request would wait until its prefill begins, if all work were spread evenly", show: span, lines: [{ name: "wait", measure: "BACKLOG" }] },
  { title: "KV used", hint: "Share of the engines' KV blocks in use", show: share, top: 1, lines: [{ name: "mean", measure: "KV_USAGE" }, { name: "highest", measure: "KV_USAGE_MAX" }] },
];

const MEASURES = {
  TTFT_P50: { name: "time to first token, median", show: span, scale: "log" },
  TTFT_P90: { name: "time to first token, p90", show: span, scale: "log" },
  OPEN_REQUESTS: { name: "open requests", show: some, scale: "even" },
  RUNNING_REQUESTS: { name: "running requests, as engines report", show: some, scale: "even" },
  PREFIX_HITS: { name: "prefix hits, as engines report", show: share, scale: "share" },
  KV_USAGE: { name: "KV used", show: share, scale: "share" },
};

const ORDERS = { id: "name", newest: "newest value, highest first", most: "highest value, highest first" };

/** Values from JSON as numbers; NaN is a string there. */
const numbers = (values = []) => values.map(Number);
const at = (timestamp) => new Date(timestamp).getTime();

/** Align `values`, whose first step begins at `start`, to `columns` steps from `from` on. NaN where there is no value. */
function aligned(values, start, { from, step, columns }) {
  const first = Math.round((start - from) / step);
  return Array.from({ length: columns }, (_, index) => values[index - first] ?? NaN);
}

export function historyView(app, query) {
  let pool = query.get("pool") ?? "";
  let measure = MEASURES[query.get("measure")] ? query.get("measure") : "TTFT_P50";
  let order = ["newest", "most"].includes(query.get("order")) ? query.get("order") : "id";
  let words = wordsOf(query.get("filter") ?? "");
  let due = { pools: 0, instances: 0 };
  let rows = [];
  let drawn;

  const curves = CHARTS.map((chart) => new Curves(chart, (index) => curves.forEach((curve) => curve.point(index))));
  const map = new HeatMap(({ id }) => { location.hash = instanceHref(id); });
  const table = new Table({ label: "Instances over the last 15 minutes", columns: columns(() => MEASURES[measure].show), key: (row) => row.id, sort: { id: "id", down: false }, address: { query, keep: app.keep }, pageSize: 25, narrow: true, empty: "No instance has been seen yet." });
  const since = el("span", { className: "muted" });
  const shown = el("span", { className: "muted" });
  const pools = el("select", { onchange: (event) => chosen({ pool: event.target.value }) }, el("option", { value: "" }, "all pools of this router"));
  const option = (value, text, selected) => el("option", { value, selected }, text);
  const measures = el("select", { onchange: (event) => chosen({ measure: event.target.value }) }, ...Object.entries(MEASURES).map(([name, described]) => option(name, described.name, name === measure)));
  const orders = el("select", { onchange: (event) => { order = event.target.value; app.keep({ order: order === "id" ? "" : order }); show(); } }, ...Object.entries(ORDERS).map(([name, text]) => option(name, text, name === order)));

  function chosen({ pool: model = pool, measure: wanted = measure }) {
    [pool, measure, due] = [model, wanted, { pools: 0, instances: 0 }];
    app.keep({ pool, measure });
    refresh().catch(app.lost);
  }

  const refresh = async () => {
    showChoice();
    const now = Date.now();
    const asked = `${pool} ${measure}`;
    const wanted = { pools: now >= due.pools, instances: now >= due.instances };
    const answers = {
      // The first page has the total, whatever its size.
      pools: wanted.pools ? await app.call("ListPoolHistories", pool ? { model: pool } : { pageSize: 1 }) : null,
      instances: wanted.instances ? await pages(app, { ...(pool && { model: pool }), measure: `INSTANCE_MEASURE_${measure}` }) : null,
    };
    if (asked !== `${pool} ${measure}`) return; // The user has chosen something else in the meantime.
    // Values change only when a step ends, so the next request waits for that.
    if (answers.pools) due.pools = now + 4500;
    if (answers.instances?.entries.length) due.instances = now + 14500;
    if (answers.pools) showPools(answers.pools);
    if (answers.instances) {
      [rows, drawn] = [answers.instances.entries, framed(answers.instances.first)];
      rows = rows.map(({ start, ...row }) => ({ ...row, id: row.instanceId, values: aligned(numbers(row.values), start, drawn) }));
      rows.sort((a, b) => names.compare(a.id, b.id));
      show();
    }
  };

  function showPools(answer) {
    const { from, to, step, seen } = framed(answer);
    const poolHistory = pool ? answer.pools?.find((row) => row.model === pool) : answer.total;
    const series = new Map((poolHistory?.series ?? []).map((row) => [row.measure.replace("POOL_MEASURE_", ""), numbers(row.values)]));
    const steps = Math.max(Math.round((to - seen) / step), 0);
    const times = Array.from({ length: steps }, (_, index) => seen + index * step);
    CHARTS.forEach(({ lines }, number) => curves[number].update(times, lines.map((line) => series.get(line.measure) ?? times.map(() => NaN)), { from, to, step, seen }));
    setText(since, sinceText(pool, answer, poolHistory));
  }

  /** Add missing pools to the choice: those with instances, and the chosen one. */
  function showChoice() {
    const models = new Set((app.fleet?.instances ?? []).map(({ instance }) => instance.model));
    if (pool) models.add(pool);
    for (const { value } of pools.options) models.delete(value);
    pools.append(...[...models].sort(names.compare).map((model) => el("option", { value: model }, model)));
    pools.value = pool;
  }

  function show() {
    if (!drawn) return;
    const { show: text, name, scale } = MEASURES[measure];
    const seen = rows.filter(({ id, model }) => words.every((word) => `${id} ${model}`.toLowerCase().includes(word)));
    const figure = (row) => (order === "newest" ? row.values.at(-1) : summed(row.values)?.most);
    const sorted = order === "id" ? seen : seen.map((row) => [figure(row), row]).sort(([a], [b]) => (Number.isFinite(b) ? b : -1) - (Number.isFinite(a) ? a : -1)).map(([, row]) => row);
    map.update(sorted, { ...drawn, show: text, scale, label: name });
    table.update(rows, ({ id, model }) => words.every((word) => `${id} ${model}`.toLowerCase().includes(word)));
    setText(shown, words.length ? `${count(seen.length)} of ${count(rows.length)}` : `${count(rows.length)} instances`);
  }

  const filter = filterBox("Filter by instance or model", (text) => {
    words = wordsOf(text);
    app.keep({ filter: text.trim() });
    show();
  });
  filter.value = query.get("filter") ?? "";
  const element = el(
    "section", {},
    el("div", { className: "head" }, el("h1", { tabIndex: -1 }, "History"), el("label", {}, "of", pools), since),
    el("div", { className: "charts" }, ...curves.map((curve) => curve.element)),
    el("h2", { className: "section" }, "Instances"),
    el("div", { className: "filters" }, el("label", {}, "Colours show", measures), el("label", {}, "sorted by", orders), filter, shown),
    map.element,
    el("h2", {}, "The same as figures"), table.element,
  );
  return { element, title: "History", refresh };
}

/** All pages of instances: the first response, and the entries of all pages, each with the start of its page's values, ms. */
async function pages(app, request) {
  const entries = [];
  let first, token;
  do {
    const page = await app.call("ListInstanceHistories", token ? { ...request, pageToken: token } : request);
    first ??= page;
    entries.push(...(page.instances ?? []).map((entry) => ({ ...entry, start: at(page.startTime) })));
    token = page.nextPageToken;
  } while (token);
  return { first, entries };
}

/** The time frame of a response: begin, end and step of the drawing (ms), number of steps, and begin of the values (ms). */
function framed(answer) {
  const step = seconds(answer.step) * 1000, window = seconds(answer.window) * 1000, to = at(answer.endTime);
  return { from: to - window, to, step, seen: at(answer.startTime), columns: Math.round(window / step) };
}

function sinceText(pool, answer, poolHistory) {
  const seen = `As this router has seen it since ${timeOf(at(answer.observedSince))}, its start.`;
  if (!poolHistory?.ownedSince) return `${seen} It does not place ${pool ? "this pool's requests: their owner knows these" : "any pool's requests"}.`;
  // owned_since comes from a sample, so it is a few seconds late even if the router has placed since its start.
  const taken = at(poolHistory.ownedSince) - at(answer.observedSince) > 5000;
  return taken ? `${seen} It has placed ${pool ? "this pool's requests" : "requests"} since ${timeOf(at(poolHistory.ownedSince))}.` : seen;
}

function columns(text) {
  const of = (get) => (row) => get(row);
  const figure = (id, title, hint, get) => ({ id, title, hint, num: true, value: get, text: (row) => (Number.isFinite(get(row)) ? text()(get(row)) : "–") });
  const mean = ({ values }) => {
    const known = values.filter(Number.isFinite);
    return known.length ? known.reduce((a, b) => a + b) / known.length : undefined;
  };
  const finite = (value) => (Number.isFinite(value) ? value : undefined);
  return [
    { id: "id", title: "Instance", value: of((row) => row.id), href: (row) => instanceHref(row.id), text: (row) => row.id },
    { id: "agent", title: "Agent", hint: "Whether an agent reports the instance now", value: (row) => (row.instanceKnown ? "reports" : "gone"), pill: true, tone: (row) => (row.instanceKnown ? "none" : "wait") },
    figure("newest", "Newest", "Value of the newest 15 s step that has ended", (row) => finite(row.values.at(-1))),
    figure("mean", "Mean", "Mean of the known values", mean),
    figure("least", "Lowest", "", (row) => summed(row.values)?.least),
    figure("most", "Highest", "", (row) => summed(row.values)?.most),
    { id: "times", title: "Known", unit: "of 15 min", num: true, value: (row) => row.values.filter(Number.isFinite).length, text: (row) => span(15 * num(row.values.filter(Number.isFinite).length)) },
    { id: "model", title: "Model", value: (row) => row.model ?? "" },
  ];
}

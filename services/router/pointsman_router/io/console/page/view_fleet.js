// The fleet: totals at the top, and one row for each instance.

import { el, setText } from "./dom.js";
import { KEPT, onePerRequest } from "./feed.js";
import { age, bare, count, countReported, num, orNone, outcomeOf, percent, reported, seconds, span } from "./format.js";
import { askLift } from "./operate.js";
import { filterBox, Table, varied, wordsOf } from "./table.js";
import { Tiles } from "./tiles.js";

export const stateOf = (status) => bare(status.state, "INSTANCE_STATE_");
/** The state of an instance without its cordon or drain, in lower case: "unhealthy"; "" if it is ready, or is the state shown. */
export const besidesOf = (status) => {
  const state = bare(status.underlyingState, "INSTANCE_STATE_");
  return [stateOf(status), "READY"].includes(state) ? "" : state.toLowerCase();
};
export const sourceOf = (status) => bare(status.prefixSource, "PREFIX_SOURCE_").toLowerCase();
export const STATE_TONES = { READY: "good", SYNCING: "wait", DRAINING: "wait", CORDONED: "wait", SUSPENDED: "wait", UNHEALTHY: "bad", LOST: "bad" };
/** The orders for an instance: "cordoned: a new disk, weight 0.1: canary"; "" without an order. */
export const orderedOf = (status) => [status.cordoned ? withReason("cordoned", status.cordonReason) : "", weightOf(status) && withReason(weightOf(status), status.weightReason)].filter(Boolean).join(", ");
const withReason = (ordered, reason) => (reason ? `${ordered}: ${reason}` : ordered);
/** The weight of an instance, "weight 0.1"; "" if it is 1. */
export const weightOf = (status) => (num(status.weight ?? 1) < 1 ? `weight ${num(status.weight)}` : "");
export const decisionsOf = (id) => `#/decisions?instance=${encodeURIComponent(id)}`;
export const instanceHref = (id) => `#/fleet/${encodeURIComponent(id)}`;

/** The hit rate of the engine's prefix cache since its start, by token; undefined before the first lookup. */
export function hitRate(load) {
  const queries = num(load?.prefixCacheQueries);
  return queries ? num(load.prefixCacheHits) / queries : undefined;
}

// Interval between two requests of orders, ms.
const ORDERS_MS = 15000;
// Time over which recent hit rates are measured, ms.
const WINDOW_MS = 60000;
// Samples of the engines' counters that this page has seen: instance and incarnation -> [[time, queries, hits], ...].
const samples = new Map();

function sample(instances) {
  const now = Date.now();
  const seen = new Set();
  for (const { instance, load } of instances) {
    const key = `${instance.instanceId} ${instance.incarnation}`;
    seen.add(key);
    const kept = samples.get(key) ?? [];
    // At most ten samples in the window, and one from before it as its begin.
    if (!load) continue;
    if (!kept.length || now - kept.at(-1)[0] > WINDOW_MS / 10) kept.push([now, num(load.prefixCacheQueries), num(load.prefixCacheHits)]);
    while (kept.length > 2 && now - kept[1][0] > WINDOW_MS) kept.shift();
    samples.set(key, kept);
  }
  for (const key of samples.keys()) if (!seen.has(key)) samples.delete(key);
}

function recentHitRate({ instance, load }) {
  const first = samples.get(`${instance.instanceId} ${instance.incarnation}`)?.[0];
  if (!first || !load) return undefined;
  const queries = num(load.prefixCacheQueries) - first[1];
  return queries > 0 ? (num(load.prefixCacheHits) - first[2]) / queries : undefined;
}

// How the requests among the newest decisions ended, by instance: {ttft (median, s; undefined: unknown), failed, ended}.
let endsOf = new Map();
const NO_ENDS = { ttft: undefined, failed: 0, ended: 0 };
const ends = (status) => endsOf.get(status.instance.instanceId) ?? NO_ENDS;

/** Each request counts once, at the instance that answered it. */
function endsByInstance(decisions) {
  const found = new Map();
  for (const decision of decisions) {
    const id = decision.steps?.at(-1)?.instance?.instanceId;
    if (!id || !decision.finished) continue;
    const sums = found.get(id) ?? { times: [], failed: 0, ended: 0 };
    found.set(id, sums);
    sums.ended += 1;
    sums.failed += outcomeOf(decision) === "FAILED" ? 1 : 0;
    if (decision.finished.timings?.firstTokenMs) sums.times.push(decision.finished.timings.firstTokenMs / 1000);
  }
  for (const sums of found.values()) sums.ttft = median(sums.times);
  return found;
}

const median = (values) => (values.length ? values.sort((a, b) => a - b)[Math.floor(values.length / 2)] : undefined);

const loaded = (name) => (status) => (status.load ? reported(status.load, name) : undefined);
const ifLoaded = (name) => (status) => (status.load ? countReported(status.load, name) : "–");

const COLUMNS = [
  { id: "instance", title: "Instance", address: true, value: (s) => s.instance.instanceId, href: (s) => instanceHref(s.instance.instanceId), note: (s) => [s.instance.model, s.instance.node && `node ${s.instance.node}`, `engine process ${orNone(s.instance.incarnation)}`].filter(Boolean).join(", ") },
  {
    id: "state", title: "State", pill: true, words: true, value: stateOf, text: (s) => [stateOf(s).toLowerCase(), besidesOf(s), weightOf(s), s.circuitOpen ? "out" : ""].filter(Boolean).join(", "),
    tone: (s) => (s.circuitOpen ? "bad" : STATE_TONES[besidesOf(s).toUpperCase()] ?? STATE_TONES[stateOf(s)]),
    note: (s) => (s.circuitOpen ? `Out: ${s.life?.reason || "requests failed in a row"}. None, or one on trial, is placed until it answers.` : [s.cordonReason, s.weightReason, s.life?.reason].filter(Boolean).join("; ")),
  },
  { id: "open", title: "Open", unit: "req", num: true, hint: "Requests placed and not finished", value: (s) => num(s.numRequests), text: (s) => count(s.numRequests) },
  { id: "pending", title: "To prefill", unit: "tok", num: true, hint: "Prompt tokens placed and not computed yet", value: (s) => num(s.pendingPrefillTokens), text: (s) => count(s.pendingPrefillTokens) },
  { id: "decode", title: "Decoding", unit: "tok", num: true, hint: "Context of the requests past their first token", value: (s) => num(s.ongoingDecodeTokens), text: (s) => count(s.ongoingDecodeTokens) },
  { id: "running", title: "Running", unit: "req", num: true, hint: "As the engine reports it", value: loaded("running"), text: ifLoaded("running"), tone: aged },
  { id: "waiting", title: "Waiting", unit: "req", num: true, hint: "As the engine reports it", value: loaded("waiting"), text: ifLoaded("waiting"), tone: aged },
  { id: "ttft", title: "First token", num: true, hint: `Median, of the requests among the newest ${KEPT} decisions whose answers the instance streamed`, value: (s) => ends(s).ttft, text: (s) => span(ends(s).ttft) },
  { id: "failed", title: "Failed", unit: "req", num: true, hint: `Of the requests among the newest ${KEPT} decisions that ended on the instance; clients' own errors do not count`, value: (s) => ends(s).failed, text: (s) => (ends(s).ended ? count(ends(s).failed) : "–"), tone: (s) => (ends(s).failed ? "bad" : ""), note: (s) => (ends(s).ended ? `of ${count(ends(s).ended)} that ended` : "none has ended") },
  { id: "kv", title: "KV used", unit: "%", num: true, hint: "Share of the engine's KV blocks in use", value: loaded("kvUsage"), text: (s) => percent(loaded("kvUsage")(s)), share: (s) => num(s.load?.kvUsage), tone: (s) => aged(s) || (num(s.load?.kvUsage) >= 0.9 ? "bad" : "") },
  { id: "recent", title: "Hits 1 min", unit: "%", num: true, hint: "Prefix cache hit rate by token, over the last minute that this page has seen", value: recentHitRate, text: (s) => percent(recentHitRate(s)), note: (s) => (hitRate(s.load) === undefined ? "" : `${percent(hitRate(s.load))} % since the engine's start`) },
  { id: "source", title: "Prefix from", value: sourceOf, tone: (s) => (sourceOf(s) === "events" ? "" : "wait"), pill: true, note: (s) => [s.prefixReason, `${count(keysOf(s))} keys of 16 tokens are known`].filter(Boolean).join("; ") },
  { id: "sessions", title: "Sessions", num: true, value: (s) => num(s.sessions), text: (s) => count(s.sessions) },
  { id: "age", title: "Report", unit: "ago", num: true, hint: "Time since the agent's last message", value: (s) => seconds(s.reportAge), words: true, text: (s) => age(seconds(s.reportAge)).replace(" ", "\u00a0") + (s.stale ? " stale" : ""), tone: aged },
  { id: "differs", title: "Differs", name: true, tone: () => "bad", shown: varied(differing), value: differing, note: () => "Its value, and that of the most instances of its pool" },
  { id: "model", title: "Model", name: true, shown: varied((s) => s.instance.model), value: (s) => s.instance.model },
];

function differing(status) {
  return [...(status.differences ?? []), status.rival && `announced twice: ${status.rival}`].filter(Boolean).join("; ");
}

function keysOf(status) {
  return num(status.keys) || num(status.approximateKeys);
}

function aged(status) {
  return status.stale || stateOf(status) === "LOST" ? "old" : "";
}

export function fleetView(app, query) {
  const table = new Table({
    label: "Instances",
    columns: COLUMNS,
    key: (status) => status.instance.instanceId,
    sort: { id: "instance", down: false },
    address: { query, keep: app.keep },
    empty: "No agent has reported an instance to this router.",
  });
  const tiles = new Tiles();
  const absent = new AbsentEngines();
  const orders = new OrdersForNobody(app);
  const shown = el("span", { className: "muted" });
  let words = wordsOf(query.get("filter") ?? "");
  const matches = (status) => {
    const text = [status.instance.instanceId, status.instance.model, stateOf(status), besidesOf(status), weightOf(status), status.instance.node, status.instance.incarnation, sourceOf(status), status.stale ? "stale" : ""].join(" ").toLowerCase();
    return words.every((word) => text.includes(word));
  };
  const draw = () => {
    if (!app.fleet) return;
    const instances = app.fleet.instances ?? [];
    sample(instances);
    endsOf = endsByInstance(onePerRequest(app.feed.newest));
    table.update(instances, matches);
    tiles.update(sums(app));
    absent.update(app.fleet.absentEngines ?? []);
    setText(shown, words.length ? `${count(table.matching)} of ${count(instances.length)}` : "");
  };
  const filter = filterBox("Filter: id, model, state, node …", (text) => {
    words = wordsOf(text);
    app.keep({ filter: text.trim() });
    draw();
  });
  filter.value = query.get("filter") ?? "";
  const element = el("section", {}, el("div", { className: "head" }, el("h1", { tabIndex: -1 }, "Fleet"), filter, shown), tiles.element, absent.element, table.element, orders.element);
  const refresh = async () => {
    draw();
    await orders.refresh();
  };
  return { element, title: "Fleet", refresh };
}

/** The engines that agents are set to follow and that have no instance, which are in no row. */
class AbsentEngines {
  constructor() {
    this.list = el("ul", {});
    this.element = el("section", { hidden: true, id: "absent" }, el("h2", {}, "Engines without an instance"), this.list);
    this.shown = "";
  }

  update(engines) {
    const shown = JSON.stringify(engines);
    if (shown === this.shown) return;
    this.shown = shown;
    this.element.hidden = !engines.length;
    this.list.replaceChildren(...engines.map((engine) => el("li", {}, el("span", { className: "id" }, engine.url), ` ${engine.problem} (agent on ${engine.node})`)));
  }
}

/** The orders for ids that no agent reports, which are in no row. There may be thousands, so they are not requested with each poll. */
class OrdersForNobody {
  constructor(app) {
    this.app = app;
    this.askedAt = -Infinity;
    this.list = el("ul", {});
    this.element = el("section", { hidden: true }, el("h2", {}, "Orders for instances that no agent reports"), this.list);
  }

  async refresh() {
    if (Date.now() - this.askedAt < ORDERS_MS) return;
    this.askedAt = Date.now();
    const { orders = [] } = await this.app.list("ListInstanceOrders", "orders");
    const nobodys = orders.filter((order) => !order.instanceKnown);
    this.element.hidden = !nobodys.length;
    this.list.replaceChildren(...nobodys.map((order) => this.row(order)));
  }

  row(order) {
    const lifted = () => {
      this.askedAt = -Infinity;
    };
    const title = this.app.who.operate ? "" : "Needs an operator's token";
    const lift = el("button", { type: "button", disabled: !this.app.who.operate, title, onclick: () => askLift(this.app, order, lifted) }, "Lift");
    return el("li", {}, el("span", { className: "id" }, order.instanceId), ` ${orderedOf(order)} `, lift);
  }
}

function sums(app) {
  const instances = app.fleet.instances ?? [];
  const sum = (get) => instances.reduce((total, status) => total + num(get(status)), 0);
  const states = {};
  for (const status of instances) states[stateOf(status)] = (states[stateOf(status)] ?? 0) + 1;
  const others = Object.entries(states).filter(([name]) => name !== "READY").map(([name, n]) => `${n} ${name.toLowerCase()}`);
  const absent = (app.fleet.absentEngines ?? []).length;
  if (absent) others.push(`${count(absent)} absent`);
  const usage = instances.filter((status) => status.load && !status.stale).map(loaded("kvUsage")).filter((share) => share !== undefined);
  const mean = usage.length ? usage.reduce((a, b) => a + b, 0) / usage.length : undefined;
  const queries = sum((status) => status.load?.prefixCacheQueries);
  const stale = instances.filter((status) => status.stale).length;
  const held = num(app.fleet.heldRequests);
  return [
    ["Ready", `${count(states.READY)} of ${count(instances.length + absent)}`, others.join(", "), states.UNHEALTHY || states.LOST || absent ? "bad" : ""],
    ["Open requests", count(sum((status) => status.numRequests)), `${count(sum((status) => status.load?.running))} running, ${count(sum((status) => status.load?.waiting))} waiting`],
    ["Held", count(held), "wait for a placement", held ? "wait" : ""],
    ["To prefill", `${count(sum((status) => status.pendingPrefillTokens))} tok`, `${count(sum((status) => status.ongoingDecodeTokens))} tok decoding`],
    ["KV used", mean === undefined ? "–" : `${percent(mean)} %`, usage.length ? `at most ${percent(usage.reduce((a, b) => Math.max(a, b), 0))} %` : "no fresh reports"],
    ["Prefix hits", queries ? `${percent(sum((status) => status.load?.prefixCacheHits) / queries)} %` : "–", "by token, since the engines' start"],
    ["Sessions", count(sum((status) => status.sessions)), "with an owner"],
    ["Decisions", `${app.feed.rate.toFixed(1)} /s`, "over 10 s"],
    ["Stale reports", count(stale), "not used in decisions", stale ? "wait" : "", "stale"],
  ];
}

// The stream of decisions, or the decisions in the log that match a filter.

import { el, setText } from "./dom.js";
import { onePerRequest } from "./feed.js";
import { classOf, clock, count, modeOf, num, orNone, outcomeOf, seconds, span } from "./format.js";
import { Table } from "./table.js";
import { classText, meaningOf } from "./words.js";

export const whyHref = (id) => `#/decisions/${encodeURIComponent(id)}`;
export const OUTCOME_TONES = { OK: "good", FAILED: "bad", REJECTED: "wait", CANCELLED: "wait", UNKNOWN: "wait", OPEN: "" };

const kindOf = (step) => (step.kind === "STEP_KIND_PREFILL" ? "prefill" : "serve");

/** The instances of a plan in the order of its steps: "a → b" if b answers from what a prefills. */
export function route(decision) {
  const ids = (decision.steps ?? []).map((step) => step.instance?.instanceId ?? "?");
  return ids.filter((id, index) => id !== ids[index - 1]).join(" → ") || "held";
}

export const plan = (decision) => (decision.steps ?? []).map((step) => `${kindOf(step)} on ${step.instance?.instanceId}`).join(", then ");
/** The cached tokens that the engine reported, without those that the request's own steps had computed; undefined if it reported none. */
export const hitsOf = (finished) => (finished?.cachedTokens === undefined ? undefined : num(finished.cachedTokens) - num(finished.ownCachedTokens));
const reported = (decision) => hitsOf(decision.finished);

/** The number of decisions that a row stands for (onePerRequest). */
const partsOf = (row) => row.parts ?? 1;

export const DECISION_COLUMNS = [
  { id: "time", title: "Time", value: (d) => d.time, text: (d) => clock(d.time), href: (d) => whyHref(d.decisionId), note: (d) => `Why? Decision ${d.decisionId} on request ${d.requestId}${partsOf(d) > 1 ? `, the last of ${partsOf(d)} on parts of its prompt` : ""}` },
  { id: "session", title: "Session", short: true, value: (d) => orNone(d.sessionId), note: (d) => [d.sessionId, d.tenant && `tenant ${d.tenant}`].filter(Boolean).join(", ") },
  { id: "class", title: "Class", value: classOf, text: (d) => classOf(d).toLowerCase(), note: (d) => classText(classOf(d)) },
  { id: "to", title: "Placed on", address: true, value: route, note: plan },
  { id: "mode", title: "Mode", value: modeOf, text: (d) => modeOf(d).toLowerCase() },
  { id: "parts", title: "Parts", num: true, hint: "Decisions on the request: one for each slice of its prompt, and one for its answer", shown: (rows) => rows.some((row) => partsOf(row) > 1), value: partsOf, text: (row) => count(partsOf(row)) },
  { id: "reason", title: "Reason", value: (d) => d.reason, note: (d) => [meaningOf(d.reason), ...(d.notes ?? [])].filter(Boolean).join("; ") },
  { id: "input", title: "Input", unit: "tok", num: true, value: (d) => num(d.inputTokens), text: (d) => count(d.inputTokens) },
  { id: "cached", title: "Predicted cached", unit: "tok", num: true, value: (d) => num(d.cachedTokens), text: (d) => count(d.cachedTokens) },
  { id: "reported", title: "Reported", unit: "tok", num: true, hint: "Cached tokens that the engine reported at the end, without those that slices of the prompt had computed", value: reported, text: (d) => (reported(d) === undefined ? "–" : count(reported(d))) },
  { id: "held", title: "Held", num: true, value: (d) => seconds(d.held) ?? 0, text: (d) => (seconds(d.held) ? span(seconds(d.held)) : "–") },
  { id: "ttft", title: "First token", num: true, hint: "Measured at the gateway, from the request's last byte to the response's first", value: (d) => d.finished?.timings?.firstTokenMs, text: (d) => (d.finished?.timings?.firstTokenMs ? span(d.finished.timings.firstTokenMs / 1000) : "–"), note: (d) => (outcomeOf(d) === "OK" && !d.finished?.timings?.firstTokenMs ? "The answer was not streamed; only streams have a first token" : "") },
  { id: "outcome", title: "Outcome", pill: true, value: outcomeOf, text: (d) => outcomeOf(d).toLowerCase(), tone: (d) => OUTCOME_TONES[outcomeOf(d)], note: (d) => d.finished?.error ?? "" },
];

// Name in the address -> title.
const FIELDS = [["session", "Session"], ["instance", "Instance"], ["request", "Request"], ["tenant", "Tenant"], ["model", "Model"], ["reason", "Reason"], ["class", "Class"], ["outcome", "Outcome"], ["since", "Made in"]];
// Values of the fields that are chosen from a list -> text.
const any = { "": "any" };
const CHOICES = {
  class: { ...any, LIGHT: "light", MEDIUM: "medium", HEAVY: "heavy" },
  outcome: { ...any, OK: "ok", OPEN: "open", FAILED: "failed", REJECTED: "rejected", CANCELLED: "cancelled", UNKNOWN: "unknown" },
  since: { "": "any time", 60: "the last minute", 300: "the last 5 minutes", 900: "the last 15 minutes", 3600: "the last hour" },
};

function matching(filter) {
  const since = filter.since ? Date.now() - Number(filter.since) * 1000 : 0;
  return (decision) =>
    (!filter.session || decision.sessionId === filter.session) &&
    (!filter.instance || (decision.steps ?? []).some((step) => step.instance?.instanceId === filter.instance)) &&
    (!filter.request || decision.requestId === filter.request) &&
    (!filter.tenant || decision.tenant === filter.tenant) &&
    (!filter.model || decision.model === filter.model) &&
    (!filter.outcome || outcomeOf(decision) === filter.outcome) &&
    (!since || new Date(decision.time).getTime() >= since) &&
    (!filter.class || classOf(decision) === filter.class) &&
    (!filter.reason || decision.reason === filter.reason);
}

export function decisionsView(app, query) {
  const filter = Object.fromEntries(FIELDS.map(([name]) => [name, allowed(name, query.get(name) ?? "")]));
  const filtered = Object.values(filter).some(Boolean);
  const table = new Table({ label: "Decisions, newest first", address: { query, keep: app.keep }, columns: DECISION_COLUMNS, key: (decision) => decision.requestId, empty: filtered ? "No decision matches." : "No decision yet: send a request through a gateway." });
  const news = el("span", { className: "muted" });
  let paused = false;
  let older = [];
  let drawn = new Map();
  // Rows do not move while the pointer or the keyboard focus is in the table.
  const busy = () => paused || table.body.matches(":hover") || table.body.contains(document.activeElement);
  const all = () => {
    const matches = matching(filter);
    const live = app.feed.newest.filter(matches);
    const known = new Set(live.map((decision) => decision.decisionId));
    // What has ended in the meantime may match no longer.
    const now = new Map(app.feed.newest.map((decision) => [decision.decisionId, decision]));
    const kept = older.filter(({ decisionId }) => !known.has(decisionId)).map((decision) => now.get(decision.decisionId) ?? decision);
    return onePerRequest([...live, ...kept.filter(matches)]);
  };
  const draw = (force = false) => {
    let rows = all();
    if (busy() && !force) {
      const fresh = rows.filter((decision) => !drawn.has(decision.requestId)).length;
      // The rows stay, but their requests may have ended in the meantime.
      const now = new Map(rows.map((decision) => [decision.requestId, decision]));
      rows = [...drawn.keys()].map((id) => now.get(id) ?? drawn.get(id));
      setText(news, fresh ? `${count(fresh)} new, ${paused ? "paused" : "held back while you are in the list"}` : paused ? "paused" : "");
    } else {
      setText(news, { live: `${app.feed.rate.toFixed(1)} /s`, full: "too many viewers: refreshed every few seconds", lost: "connection lost, reconnecting" }[app.feed.state] ?? "");
    }
    drawn = new Map(rows.map((decision) => [decision.requestId, decision]));
    table.update(rows);
  };
  const pause = el("button", {
    type: "button", className: "quiet", "aria-pressed": "false",
    onclick: () => {
      paused = !paused;
      pause.setAttribute("aria-pressed", String(paused));
      draw(!paused);
    },
  }, "Pause");
  const inputs = FIELDS.map(([name, title]) => [name, field(name, title, filter[name])]);
  const go = (event) => {
    event.preventDefault();
    const order = new URLSearchParams(location.hash.split("?")[1] ?? "").get("sort");
    const given = [...inputs.map(([name, { input }]) => [name, input.value.trim()]), ["sort", order]].filter(([, value]) => value);
    location.hash = `#/decisions${given.length ? `?${new URLSearchParams(given)}` : ""}`;
  };
  const form = el("form", { className: "filters", onsubmit: go, onchange: (event) => event.target.tagName === "SELECT" && form.requestSubmit() },
    ...inputs.map(([, { label }]) => label), el("button", { type: "submit", className: "quiet" }, "Filter"),
    filtered ? el("a", { href: "#/decisions" }, "Clear") : undefined);
  const element = el("section", {}, el("div", { className: "head" }, el("h1", { tabIndex: -1 }, "Decisions"), pause, news), form, table.element);
  const onNews = () => draw();
  app.feed.listeners.add(onNews);
  const refresh = async () => {
    if (filtered || app.feed.state === "full") {
      const wanted = { sessionId: filter.session, instanceId: filter.instance, requestId: filter.request, routeClass: filter.class ? `ROUTE_CLASS_${filter.class}` : undefined, reason: filter.reason, tenant: filter.tenant, model: filter.model, outcome: filter.outcome ? `DECISION_OUTCOME_${filter.outcome}` : undefined, since: filter.since ? `${filter.since}s` : undefined };
      older = (await app.call("ListDecisions", { filter: wanted, pageSize: 200 })).decisions ?? [];
    }
    if (app.feed.state !== "off") draw();
  };
  return { element, title: "Decisions", refresh, close: () => app.feed.listeners.delete(onNews) };
}

/** A value of a filter from the address; "" for one that is not among the choices. */
const allowed = (name, value) => (CHOICES[name] && !Object.hasOwn(CHOICES[name], value) ? "" : value);

function field(name, title, value) {
  const input = CHOICES[name]
    ? el("select", {}, ...Object.keys(CHOICES[name]).sort((a, b) => Boolean(a) - Boolean(b)).map((choice) => el("option", { value: choice, selected: choice === value }, CHOICES[name][choice])))
    : el("input", { value, size: name === "request" ? 20 : 14, spellcheck: false, autocomplete: "off", className: name === "session" ? "filter" : "" });
  return { input, label: el("label", {}, title, input) };
}

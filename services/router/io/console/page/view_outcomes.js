// How decisions ended: offloads first, then all by class, mode and reason.

import { el, facts, setText } from "./dom.js";
import { classOf, clock, count, modeOf, num, outcomeOf, percent, seconds, span } from "./format.js";
import { Table } from "./table.js";

const outcome = (name) => (group) => num(group.outcomes?.find((one) => outcomeOf(one) === name)?.decided);
const counted = (id, title, get, hint, tone) => ({ id, title, hint, num: true, value: get, text: (group) => (get(group) ? count(get(group)) : "–"), tone: tone && ((group) => (get(group) ? tone : "")) });
const rate = (get) => (group) => (num(group.reportedInputTokens) ? num(get(group)) / num(group.reportedInputTokens) : undefined);
const shared = (id, title, get, hint) => ({ id, title, unit: "%", hint, num: true, value: get, text: (group) => percent(get(group), 1) });

const COLUMNS = [
  { id: "class", title: "Class", value: (g) => classOf(g).toLowerCase() },
  { id: "mode", title: "Mode", value: (g) => modeOf(g).toLowerCase() },
  { id: "reason", title: "Reason", value: (g) => g.reason ?? "" },
  counted("decided", "Decided", (g) => num(g.decided)),
  counted("ok", "OK", outcome("OK")),
  counted("open", "Open", outcome("OPEN")),
  counted("cancelled", "Cancelled", outcome("CANCELLED"), "The client left"),
  counted("rejected", "Rejected", outcome("REJECTED"), "The engine answered 4xx"),
  counted("failed", "Failed", outcome("FAILED"), "The engine failed or could not be reached", "bad"),
  counted("unknown", "Unknown", outcome("UNKNOWN"), "It ended, and its gateway did not say how"),
  counted("fellback", "Fell back", (g) => num(g.fellBack), "A step failed, and one instance answered alone", "wait"),
  counted("held", "Held", (g) => num(g.held), "Waited for the decision"),
  { id: "input", title: "Input", unit: "tok each", num: true, value: (g) => num(g.inputTokens) / num(g.decided), text: (g) => count(num(g.inputTokens) / num(g.decided)) },
  shared("predicted", "Predicted cached", rate((g) => g.predictedCachedTokens), "Of the input, where the engine told its own figure"),
  shared("reported", "Reported cached", rate((g) => g.reportedCachedTokens), "Of the input, as engines told it"),
  { id: "p50", title: "First token", unit: "median", num: true, value: (g) => seconds(g.ttftP50), text: (g) => span(seconds(g.ttftP50)) },
  { id: "p95", title: "First token", unit: "p95", num: true, value: (g) => seconds(g.ttftP95), text: (g) => span(seconds(g.ttftP95)) },
];

export function outcomesView(app) {
  const table = new Table({ label: "Outcomes by class, mode and reason", columns: COLUMNS, key: (g) => `${g.routeClass} ${g.mode} ${g.reason}`, empty: "No decision yet." });
  const offloads = el("div", {});
  const since = el("span", { className: "muted" });
  const last = el("select", { onchange: () => refresh().catch(app.lost) }, ...[100, 1000, 10000].map((n) => el("option", { value: String(n), selected: n === 1000 }, count(n))));
  const refresh = async () => {
    const answer = await app.call("SummarizeDecisions", { last: Number(last.value) });
    const groups = answer.groups ?? [];
    table.update(groups);
    offloads.replaceChildren(offloaded(groups));
    setText(since, answer.oldest ? `${count(answer.decided)} since ${clock(answer.oldest)}` : "");
  };
  const element = el(
    "section", {},
    el("div", { className: "head" }, el("h1", { tabIndex: -1 }, "Outcomes"), el("label", {}, "of the last", last, "decisions"), since),
    el("h2", {}, "Offloads ", el("span", { className: "muted" }, "prefilled by one instance, answered by another")), offloads,
    el("h2", {}, "All"), table.element,
  );
  return { element, title: "Outcomes", refresh };
}

function offloaded(groups) {
  const those = groups.filter((group) => modeOf(group) === "OFFLOAD");
  const sum = (get) => those.reduce((total, group) => total + num(get(group)), 0);
  const decided = sum((group) => group.decided);
  if (!decided) return el("p", { className: "empty" }, "None: no policy in force then chose to offload, or no two engines can pass KV on.");
  const ended = decided - sum(outcome("OPEN"));
  const share = (n) => (ended ? `${count(n)} (${percent(n / ended, 1)} %)` : count(n));
  return facts([
    ["Decided", count(decided)],
    ["Still open", count(decided - ended)],
    ["Answered", share(sum(outcome("OK")))],
    ["of them alone, after a step failed", share(sum((group) => group.fellBack))],
    ["Cancelled", share(sum(outcome("CANCELLED")))],
    ["Rejected", share(sum(outcome("REJECTED")))],
    ["Failed", share(sum(outcome("FAILED")))],
  ]);
}

// How decisions ended: in total, by class, mode and reason, and those of requests that two instances served.

import { el, facts, setText } from "./dom.js";
import { classOf, clock, count, modeOf, num, outcomeOf, percent, seconds, span } from "./format.js";
import { Table } from "./table.js";
import { Tiles } from "./tiles.js";
import { classText, meaningOf } from "./words.js";

const outcome = (name) => (group) => num(group.outcomes?.find((counted) => outcomeOf(counted) === name)?.decided);
const counted = (id, title, get, hint, tone) => ({ id, title, hint, num: true, value: get, text: (group) => (get(group) ? count(get(group)) : "–"), tone: tone && ((group) => (get(group) ? tone : "")) });
/** A column that is mostly 0: shown only if some value is not. */
const seldom = (...column) => ({ ...counted(...column), shown: (groups) => groups.some(column[2]) });
const rate = (get) => (group) => (num(group.reportedInputTokens) ? num(get(group)) / num(group.reportedInputTokens) : undefined);
const shared = (id, title, get, hint) => ({ id, title, unit: "%", hint, num: true, value: get, text: (group) => percent(get(group), 1) });
const predicted = rate((g) => g.predictedCachedTokens);
const reported = rate((g) => g.reportedCachedTokens);
const time = (id, unit, get) => ({ id, title: "First token", unit, num: true, value: (g) => seconds(get(g)), text: (g) => span(seconds(get(g))) });

const COLUMNS = [
  { id: "class", title: "Class", value: (g) => classOf(g).toLowerCase(), note: (g) => classText(classOf(g)) },
  { id: "mode", title: "Mode", value: (g) => modeOf(g).toLowerCase() },
  { id: "reason", title: "Reason", name: true, value: (g) => g.reason ?? "", note: (g) => meaningOf(g.reason) },
  counted("decided", "Decided", (g) => num(g.decided)),
  counted("ok", "OK", outcome("OK")),
  seldom("failed", "Failed", outcome("FAILED"), "The engine failed or could not be reached", "bad"),
  seldom("rejected", "Rejected", outcome("REJECTED"), "The engine answered with 4xx"),
  seldom("cancelled", "Cancelled", outcome("CANCELLED"), "The client disconnected"),
  seldom("unknown", "Unknown", outcome("UNKNOWN"), "The request ended, and its gateway did not report how"),
  seldom("open", "Open", outcome("OPEN")),
  seldom("fellback", "Fell back", (g) => num(g.fellBack), "A step failed, and one instance served the request alone", "wait"),
  seldom("held", "Held", (g) => num(g.held), "Held before the decision"),
  time("p50", "median", (g) => g.ttftP50),
  time("p95", "p95", (g) => g.ttftP95),
  { id: "input", title: "Input", unit: "tok each", num: true, value: (g) => num(g.inputTokens) / num(g.decided), text: (g) => count(num(g.inputTokens) / num(g.decided)) },
  shared("predicted", "Predicted cached", predicted, "Share of the input that was predicted to be cached, for requests whose engine reported its own figure"),
  shared("reported", "Reported cached", reported, "Share of the input that was cached, as engines reported it"),
];

export function outcomesView(app, query) {
  const tiles = new Tiles();
  const table = new Table({ label: "Outcomes by class, mode and reason", address: { query, keep: app.keep }, columns: COLUMNS, key: (g) => `${g.routeClass} ${g.mode} ${g.reason}`, empty: "No decision yet." });
  const offloads = el("section", { hidden: true });
  const since = el("span", { className: "muted" });
  const chosen = () => {
    app.keep({ last: last.value === "1000" ? "" : last.value });
    refresh().catch(app.lost);
  };
  const asked = ["100", "10000"].includes(query.get("last")) ? query.get("last") : "1000";
  const last = el("select", { onchange: chosen }, ...["100", "1000", "10000"].map((n) => el("option", { value: n, selected: n === asked }, count(n))));
  const refresh = async () => {
    const answer = await app.call("SummarizeDecisions", { last: Number(last.value) });
    const groups = answer.groups ?? [];
    tiles.update(sums(answer.total ?? {}));
    table.update(groups);
    const those = groups.filter((group) => modeOf(group) === "OFFLOAD");
    offloads.hidden = !those.length;
    if (those.length) offloads.replaceChildren(...offloaded(those));
    setText(since, answer.oldest ? `${count(answer.decided)} since ${clock(answer.oldest)}` : "");
  };
  const element = el(
    "section", {},
    el("div", { className: "head" }, el("h1", { tabIndex: -1 }, "Outcomes"), el("label", {}, "of the last", last, "decisions"), since),
    tiles.element, table.element, offloads,
  );
  return { element, title: "Outcomes", refresh };
}

/** The tiles, over all decisions: how many requests succeed, how soon responses begin, and how much is cached. */
function sums(total) {
  const [ok, open, failed, rejected, cancelled, unknown] = ["OK", "OPEN", "FAILED", "REJECTED", "CANCELLED", "UNKNOWN"].map((name) => outcome(name)(total));
  const ended = num(total.decided) - open;
  const of = (n) => (ended ? `${percent(n / ended, 1)} % of those that ended` : "");
  return [
    ["Answered", ended ? `${percent(ok / ended, 1)} %` : "–", `${count(ok)} of ${count(ended)} that ended`],
    ["Failed", count(failed), of(failed), failed ? "bad" : ""],
    ["First token", span(seconds(total.ttftP50)), `median; p95 ${span(seconds(total.ttftP95))}`],
    ["Cached", reported(total) === undefined ? "–" : `${percent(reported(total), 1)} %`, reported(total) === undefined ? "not reported by any engine" : `of the input; predicted ${percent(predicted(total), 1)} %`],
    ["Held", count(total.held), "before the decision", num(total.held) ? "wait" : ""],
    ["Rejected", count(rejected), "the engine answered with 4xx", rejected ? "wait" : ""],
    ["Cancelled", count(cancelled), unknown ? `the client disconnected; ${count(unknown)} ended unknown` : "the client disconnected"],
    ["Open", count(open), "not ended yet"],
  ];
}

function offloaded(those) {
  const sum = (get) => those.reduce((total, group) => total + num(get(group)), 0);
  const decided = sum((group) => group.decided);
  const ended = decided - sum(outcome("OPEN"));
  const share = (n) => (ended ? `${count(n)} (${percent(n / ended, 1)} %)` : count(n));
  return [
    el("h2", {}, "Offloads ", el("span", { className: "muted" }, "prefilled by one instance, answered by another")),
    facts([
      ["Decided", count(decided)],
      ["Still open", count(decided - ended)],
      ["Answered", share(sum(outcome("OK")))],
      ["of them by one instance, after a step failed", share(sum((group) => group.fellBack))],
      ["Cancelled", share(sum(outcome("CANCELLED")))],
      ["Rejected", share(sum(outcome("REJECTED")))],
      ["Failed", share(sum(outcome("FAILED")))],
    ]),
  ];
}

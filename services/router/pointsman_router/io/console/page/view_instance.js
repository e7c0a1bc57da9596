// One instance: all that the router knows about it, and its latest decisions and sessions.

import { el, facts, link, pill } from "./dom.js";
import { onePerRequest } from "./feed.js";
import { age, bare, count, countReported, num, orNone, percent, reported, seconds } from "./format.js";
import { askCordon, askDrain, askWeight } from "./operate.js";
import { Table } from "./table.js";
import { DECISION_COLUMNS } from "./view_decisions.js";
import { besidesOf, decisionsOf, hitRate, orderedOf, sourceOf, stateOf, STATE_TONES } from "./view_fleet.js";
import { SESSION_COLUMNS } from "./view_sessions.js";

// What the requests on an instance show about it, in words.
function evidenceOf(status) {
  const life = status.life;
  if (!life) return "";
  const parts = [`${count(life.answers ?? 0)} answers`];
  if (life.lastAnswerAge) parts.push(`the last ${age(seconds(life.lastAnswerAge))} ago`);
  if (life.waiting) parts.push(`${count(life.waiting)} wait for a first byte`);
  if (life.failures) parts.push(`${life.failures} failures in a row`);
  if (life.errors) parts.push(`${life.errors} errors in a row${life.status ? `, the last ${life.status}` : ""}`);
  if (life.reason) parts.push(life.reason);
  return parts.join(", ");
}

export function instanceView(app, id) {
  const decisions = new Table({ label: "Decisions for it", columns: DECISION_COLUMNS, key: (decision) => decision.requestId, pageSize: 25, empty: "No decision in the log placed a request on it." });
  const sessions = new Table({ label: "Sessions it owns", narrow: true, columns: SESSION_COLUMNS.filter(({ id }) => id !== "owner"), key: (session) => `${session.tenant}/${session.sessionId}/${session.model}`, pageSize: 25, empty: "It owns no session." });
  const about = el("div", {});
  const button = (text, ask) => el("button", { type: "button", disabled: true, onclick: () => status && ask(app, status) }, text);
  const drain = button("Drain", askDrain);
  const cordon = button("Cordon", askCordon);
  const weight = button("Weight", askWeight);
  let status;
  const element = el(
    "section", {},
    el("div", { className: "head" }, link(app.addressOf("#/fleet"), "← Fleet"), el("h1", { tabIndex: -1 }, id), drain, cordon, weight),
    about,
    el("h2", {}, "Latest decisions ", el("a", { href: decisionsOf(id) }, "all")), decisions.element,
    el("h2", {}, "Sessions "), sessions.element,
  );
  const refresh = async () => {
    status = app.fleet?.instances?.find((known) => known.instance.instanceId === id);
    if (!app.fleet) return;
    about.replaceChildren(status ? described(status) : el("p", { className: "empty" }, "The router does not know this instance."));
    drain.textContent = status && stateOf(status) === "DRAINING" ? "Resume" : "Drain";
    cordon.textContent = status?.cordoned ? "Uncordon" : "Cordon";
    for (const operation of [drain, cordon, weight]) {
      operation.disabled = !status || !app.who.operate;
      operation.title = app.who.operate ? "" : "Needs an operator's token";
    }
    const [made, owned] = await Promise.all([
      app.call("ListDecisions", { filter: { instanceId: id }, pageSize: 25 }),
      app.call("ListSessions", { instanceId: id, pageSize: 100 }),
    ]);
    decisions.update(onePerRequest(made.decisions ?? []));
    sessions.update(owned.sessions ?? []);
  };
  return { element, title: id, up: "#/fleet", refresh };
}

function described(status) {
  const { instance, load } = status;
  const sampled = load ? `${age(num(load.sampleAgeMs) / 1000)} old${status.stale ? ", stale: not used in decisions" : ""}` : "none yet";
  const transfer = instance.kvTransfer;
  return el(
    "div", { className: "columns" },
    el("div", {}, el("h2", {}, "Now"), facts([
      ["State", el("span", {}, pill(stateOf(status).toLowerCase(), STATE_TONES[stateOf(status)]), besidesOf(status) ? ` and ${besidesOf(status)}` : "", status.circuitOpen ? ` out: ${status.life?.reason || "requests failed"}; one is tried from time to time` : "")],
      ["By its requests", evidenceOf(status)],
      ["Suspended", load?.suspended ?? ""],
      ["Problem", load?.problem ?? ""],
      ["Orders", orderedOf(status)],
      ["Last agent message", `${age(seconds(status.reportAge))} ago`],
      ["Open requests", count(status.numRequests)],
      ["To prefill", `${count(status.pendingPrefillTokens)} tok`],
      ["Decoding", `${count(status.ongoingDecodeTokens)} tok`],
      ["Input of all open", `${count(status.ongoingTokens)} tok`],
      ["Sessions owned", count(status.sessions)],
    ])),
    el("div", { "data-tone": status.stale ? "old" : "" }, el("h2", {}, "As the engine reports"), facts([
      ["Report", sampled],
      ...(load ? [
        ["Running", `${countReported(load, "running")} req`],
        ["Waiting", `${countReported(load, "waiting")} req`],
        ["KV used", `${percent(reported(load, "kvUsage"), 1)} %${num(instance.kvCapacityTokens) ? ` of ${count(instance.kvCapacityTokens)} tok` : ""}`],
        ["Prefix hits", `${percent(hitRate(load), 1)} % of ${count(load.prefixCacheQueries)} tok`],
        ["External hits", num(load.externalPrefixCacheQueries) ? `${percent(num(load.externalPrefixCacheHits) / num(load.externalPrefixCacheQueries), 1)} % of ${count(load.externalPrefixCacheQueries)} tok` : ""],
        ["Generated", `${countReported(load, "generationTokens")} tok`],
        ["Preemptions", countReported(load, "preemptions")],
        ["Not reported", (load.unknown ?? []).join(", ")],
        ...(load.gpus ?? []).map((gpu) => [`GPU ${num(gpu.index)}`, `${percent(num(gpu.utilisation))} % busy, ${(num(gpu.memoryUsed) / 2 ** 30).toFixed(1)} of ${(num(gpu.memoryTotal) / 2 ** 30).toFixed(1)} GiB`]),
      ] : []),
    ])),
    el("div", {}, el("h2", {}, "Prefix knowledge"), facts([
      ["Source", sourceOf(status)],
      ["Reason", status.prefixReason],
      ["Keys", `${count(status.keys)} × 16 tok`],
      ["Approximate keys", count(status.approximateKeys)],
      ["Provisional keys", count(status.provisionalKeys)],
      ["Prediction audit failed", num(status.predictionAuditFailures) ? `${count(status.predictionAuditFailures)} times since the engine's start` : "never"],
    ])),
    el("div", {}, el("h2", {}, "Engine"), facts([
      ["Model", instance.model],
      ["Also answers to", [...(instance.servedNames ?? []).filter((name) => name !== instance.model), ...(instance.loraNames ?? [])].join(", ")],
      ["Process", el("span", { title: "Id of one lifetime of the engine process; it changes with a restart" }, orNone(instance.incarnation))],
      ["Address", instance.url],
      ["Data-parallel rank at this address", instance.dataParallelRank === undefined ? "" : String(instance.dataParallelRank)],
      ["Node", instance.node],
      ["Version", instance.engineVersion],
      ["Hardware", instance.hardware],
      ["KV block", `${count(instance.blockSize)} tok`],
      ["Longest context", num(instance.maxModelLen) ? `${count(instance.maxModelLen)} tok` : ""],
      ["Differs from the most of its pool", (status.differences ?? []).join("; ")],
      ["Refused second agent", status.rival],
      ["KV transfer", transfer ? `${bare(transfer.protocol, "KV_PROTOCOL_").toLowerCase()}, ${bare(transfer.role, "KV_ROLE_").toLowerCase() || "both sides"}` : "none"],
      ...(transfer?.wrongFrom ?? []).map((sender) => ["Wrong KV", `from ${sender.bootstrapUrl}, in ${count(sender.requests)} requests; not used`]),
    ])),
  );
}

// One decision: the candidates that were compared, how the request ended, and what other policies would have done.

import { el, facts, link, pill, setText } from "./dom.js";
import { age, bare, classOf, count, countReported, figure, modeOf, moment, num, outcomeOf, percent, reported, seconds, signed, span } from "./format.js";
import { Table } from "./table.js";
import { hitsOf, OUTCOME_TONES, route } from "./view_decisions.js";
import { instanceHref, sourceOf, STATE_TONES } from "./view_fleet.js";
import { classText, meaningOf, reasonText } from "./words.js";

export function whyView(app, id) {
  const body = el("div", {});
  const heading = el("h1", { tabIndex: -1 }, `Decision ${id}`);
  const element = el("section", {}, el("div", { className: "head" }, el("a", { href: app.addressOf("#/decisions") }, "← Decisions"), heading), body);
  let shown;
  let closed = false;
  const refresh = async () => {
    // A decision does not change after its request has ended.
    if (shown && outcomeOf(shown) !== "OPEN") return;
    let decision;
    try {
      ({ decision } = await app.call("GetDecision", { decisionId: id }));
    } catch (error) {
      if (error.status !== 404) throw error;
      body.replaceChildren(el("p", { className: "empty" }, "It is not in this router's log: another replica made it, or the log no longer has it."));
      return;
    }
    if (shown?.outcome === decision.outcome) return;
    const first = !shown;
    shown = decision;
    setText(heading, `Why ${decision.requestId} went to ${route(decision)}`);
    const others = first ? otherPolicies(app, decision, () => closed) : body.querySelector("#others");
    body.replaceChildren(...described(decision), others);
  };
  return { element, title: `Why ${id}`, up: "#/decisions", refresh, close: () => { closed = true; } };
}

function described(decision) {
  const candidates = decision.candidates ?? [];
  const last = decision.steps?.at(-1)?.instance?.instanceId;
  return [
    verdict(decision, candidates, last),
    el("div", { className: "columns" }, asked(decision), decided(decision), came(decision)),
    el("h2", {}, "Plan"), steps(decision),
    el("h2", {}, `Candidates `, el("span", { className: "muted" }, `${candidates.length} as they were then${others(decision)}; the lowest score wins`)),
    candidateTable(decision, candidates, last),
  ];
}

function others(decision) {
  return decision.otherInstances ? `, those with the most cached tokens and those with the least load, of ${count((decision.candidates?.length ?? 0) + decision.otherInstances)}` : "";
}

function verdict(decision, candidates, last) {
  const chosen = candidates.find((candidate) => candidate.instanceId === last);
  const prefiller = candidates.find((candidate) => candidate.instanceId === decision.steps?.[0]?.instance?.instanceId) ?? chosen;
  const parts = [`${count(prefiller?.newTokens)} of ${count(decision.inputTokens)} input tokens were not cached there. `];
  const meaning = meaningOf(decision.reason);
  parts.push(`Policy ${policyOf(decision)} chose it: ${meaning ? `${meaning} (${decision.reason})` : decision.reason}`);
  if (decision.runnerUp && decision.margin !== undefined) parts.push(`; the runner-up, ${decision.runnerUp}, scored ${decision.margin === 0 ? "the same" : `${figure(Math.abs(decision.margin))} ${decision.margin > 0 ? "worse" : "better"}`}`);
  else if (decision.runnerUp) parts.push(`; next by score was ${decision.runnerUp}`);
  else if (candidates.length === 1) parts.push("; there was no other instance");
  parts.push(".");
  if (decision.sessionOwner && decision.sessionOwner !== last) parts.push(` The session left its owner, ${decision.sessionOwner}.`);
  if (decision.degraded) parts.push(" It was made while the shared store was away.");
  return el("p", { className: "verdict" }, parts.join(""));
}

/** "unified"; "auto, which took foresight," if the policy left the decision to another one. */
function policyOf(decision) {
  const name = decision.policy?.name;
  return decision.takenPolicy ? `${name}, which took ${decision.takenPolicy},` : name;
}

function priorityOf(decision) {
  const word = (decision.priority ?? "").replace("PRIORITY_", "").toLowerCase();
  return num(decision.weight) > 1 ? `${word}, weight ${decision.weight}` : word;
}

function asked(decision) {
  return el("div", {}, el("h2", {}, "Request"), facts([
    ["Request", decision.requestId],
    ["Session", decision.sessionId ? link(`#/decisions?session=${encodeURIComponent(decision.sessionId)}`, decision.sessionId) : "none"],
    ["Agent", decision.agentId],
    ["Started by", decision.agentParentSessionId ? link(`#/decisions?session=${encodeURIComponent(decision.agentParentSessionId)}`, decision.agentParentSessionId) : ""],
    ["Tenant", decision.tenant],
    ["Model", decision.model],
    ["Input", `${count(decision.inputTokens)} tok`],
    ["Known by", num(decision.keyCount) ? `${count(decision.keyCount)} block keys` : "length only, no prefix knowledge"],
    ["Priority", priorityOf(decision)],
    ["Held before", seconds(decision.held) ? span(seconds(decision.held)) : ""],
    ["Parked before", seconds(decision.admission?.waited) ? span(seconds(decision.admission.waited)) : ""],
    ["Admission", decision.admission ? `${decision.admission.reason}: ${count(decision.admission.size ?? 0)} tok beside ${count(decision.admission.weighted ?? 0)}, of ${count(decision.admission.capacity ?? 0)}` : ""],
  ]));
}

function decided(decision) {
  const settings = Object.entries(decision.policy?.settings ?? {}).sort();
  return el("div", {}, el("h2", {}, "Decision"), facts([
    ["Made", moment(decision.time)],
    ["Took", span(seconds(decision.decideTime))],
    ["Class", classText(classOf(decision))],
    ["Mode", modeOf(decision).toLowerCase()],
    ["Policy", decision.takenPolicy ? `${decision.policy?.name} took ${decision.takenPolicy}` : decision.policy?.name],
    ["Policy taken for", decision.takenPolicy ? reasonText(decision.takenPolicyReason) : ""],
    ["Reason", reasonText(decision.reason)],
    ["Predicted cached", `${count(decision.cachedTokens)} tok`],
    ["Of that to load", loadNote(decision.kvLoad)],
    ["Owner before", decision.sessionOwner],
    ["Owner after", decision.nextOwner],
    ["Notes", (decision.notes ?? []).join("; ")],
    ...Object.entries(decision.figures ?? {}).sort().map(([name, value]) => [name, figure(value)]),
    ["Inputs' digest", decision.inputsDigest && BigInt(decision.inputsDigest).toString(16).padStart(16, "0")],
  ]), settings.length ? el("details", {}, el("summary", {}, `${decision.policy.name}'s settings`), facts(settings.map(([name, value]) => [name, figure(value)]))) : undefined);
}

function came(decision) {
  const done = decision.finished;
  const timings = done?.timings;
  const hit = hitsOf(done);
  const own = num(done?.ownCachedTokens);
  return el("div", {}, el("h2", {}, "Result"), facts([
    ["Outcome", pill(outcomeOf(decision).toLowerCase(), OUTCOME_TONES[outcomeOf(decision)])],
    ["Error", done?.error],
    ["HTTP status", done?.httpStatus ? String(done.httpStatus) : ""],
    ["Ended by", bare(done?.finishReason, "FINISH_REASON_").toLowerCase()],
    ["Reported cached", hit === undefined ? (done ? "not reported by the engine" : "") : own ? `${count(hit)} tok; its own slices had computed ${count(own)} more` : `${count(hit)} tok (${signed(hit - num(decision.cachedTokens) - num(decision.kvLoad?.priceTokens))} compared with the prediction)`],
    ["Prompt", done?.promptTokens === undefined ? "" : `${count(done.promptTokens)} tok by the engine's count`],
    ["Output", done?.outputTokens === undefined ? "" : `${count(done.outputTokens)} tok`],
    ["First token after", timings?.firstTokenMs ? span(timings.firstTokenMs / 1000) : outcomeOf(decision) === "OK" ? "unknown: the answer was not streamed" : ""],
    ["Done after", timings?.doneMs ? span(timings.doneMs / 1000) : ""],
  ]), timings ? phases(timings) : undefined);
}

/** The phases of the request at the gateway, as bars whose lengths are the phases' times. */
function phases(timings) {
  const ends = [["placing", timings.placedMs], ["sending", timings.sentMs], ["to the first token", timings.firstTokenMs], ["answering", timings.doneMs]].filter(([, end]) => num(end));
  let from = 0;
  const parts = ends.map(([name, end]) => {
    const part = { name, ms: Math.max(end - from, 0) };
    from = Math.max(end, from);
    return part;
  });
  const bars = parts.map(({ ms }, index) => {
    const bar = el("i", { "data-phase": String(index) });
    bar.style.setProperty("flex-grow", String(ms));
    return bar;
  });
  const words = parts.map(({ name, ms }) => `${span(ms / 1000)} ${name}`).join(", ");
  return el("figure", { className: "phases" }, el("div", { "aria-hidden": "true" }, ...bars), el("figcaption", {}, words));
}

function steps(decision) {
  const listed = (decision.steps ?? []).map((step) => {
    const prefill = step.kind === "STEP_KIND_PREFILL";
    const what = prefill ? `Prefill ${count(step.prefixTokens)} tokens on ` : "Serve on ";
    const source = step.kvSource ? ` from the KV of ${step.kvSource.instanceId}` : "";
    return el("li", {}, what, link(instanceHref(step.instance?.instanceId), step.instance?.instanceId ?? "?"), `${source}: ${reasonText(step.reason || decision.reason)}`);
  });
  return listed.length ? el("ol", { className: "steps" }, ...listed) : el("p", {}, "No steps: the request would have been held.");
}

function candidateTable(decision, candidates, last) {
  const roles = new Map();
  if (decision.runnerUp) roles.set(decision.runnerUp, "runner-up");
  for (const step of decision.steps ?? []) roles.set(step.instance?.instanceId, step.kind === "STEP_KIND_PREFILL" ? "prefills" : "serves");
  if (last) roles.set(last, "chosen");
  const best = candidates.find((candidate) => candidate.instanceId === last)?.score;
  const rank = (candidate) => ({ chosen: 0, prefills: 1, "runner-up": 2 })[roles.get(candidate.instanceId)] ?? 3;
  const ordered = [...candidates].sort((a, b) => rank(a) - rank(b) || (a.score ?? Infinity) - (b.score ?? Infinity));
  const amount = (id, title, unit, hint) => ({ id, title, unit, hint, num: true, value: (c) => num(c[id]), text: (c) => count(c[id]) });
  const old = (c) => (c.stale ? "old" : "");
  const table = new Table({
    label: "Candidates",
    pageSize: 50,
    key: (candidate) => candidate.instanceId,
    tone: (candidate) => roles.get(candidate.instanceId) === "chosen" ? "chosen" : candidate.excluded ? "old" : "",
    empty: "Not available: a previous owner of the pool made the decision.",
    columns: [
      { id: "instance", title: "Instance", address: true, value: (c) => c.instanceId, href: (c) => instanceHref(c.instanceId), note: (c) => `engine process ${c.incarnation}` },
      { id: "role", title: "Role", pill: true, value: (c) => roles.get(c.instanceId) ?? (c.excluded ? "excluded" : ""), text: (c) => roles.get(c.instanceId) ?? (c.excluded ? c.excluded.replaceAll("_", " ") : ""), tone: (c) => (roles.get(c.instanceId) === "chosen" ? "good" : roles.has(c.instanceId) ? "wait" : c.excluded ? "bad" : "none") },
      { id: "score", title: "Score", num: true, hint: "The policy's score; the lowest wins", value: (c) => c.score, text: (c) => figure(c.score) },
      { id: "behind", title: "Behind", num: true, hint: "Its score minus that of the chosen instance", value: (c) => c.score, text: (c) => (c.score === undefined || best === undefined ? "–" : figure(c.score - best)) },
      amount("cachedTokens", "Cached", "tok", "Tokens of this prompt that it has cached"),
      { id: "load", title: "To load", unit: "tok", num: true, hint: "Tokens below its GPU, in host memory or storage", shown: (rows) => rows.some((c) => c.kvLoad), value: (c) => loadTokens(c.kvLoad), text: (c) => (c.kvLoad ? count(loadTokens(c.kvLoad)) : "–"), note: (c) => loadNote(c.kvLoad) },
      amount("newTokens", "New", "tok", "Input minus cached"),
      amount("numRequests", "Open", "req"),
      amount("pendingPrefillTokens", "To prefill", "tok"),
      amount("ongoingDecodeTokens", "Decoding", "tok"),
      { ...amount("running", "Running", "req"), text: (c) => countReported(c, "running"), tone: old },
      { ...amount("waiting", "Waiting", "req"), text: (c) => countReported(c, "waiting"), tone: old },
      { id: "kv", title: "KV used", unit: "%", num: true, value: (c) => reported(c, "kvUsage"), text: (c) => percent(reported(c, "kvUsage")), share: (c) => num(c.kvUsage), tone: old },
      { id: "age", title: "Report", unit: "ago", num: true, value: (c) => seconds(c.reportAge), words: true, text: (c) => age(seconds(c.reportAge)).replace(" ", "\u00a0") + (c.stale ? " stale" : ""), tone: old },
      { id: "source", title: "Prefix from", value: sourceOf, note: (c) => (num(c.provisionalTokens) ? `${count(c.provisionalTokens)} tokens provisional, not confirmed by events` : "") },
      { id: "state", title: "State", pill: true, shown: (rows) => rows.some((c) => c.state !== "INSTANCE_STATE_READY"), value: (c) => bare(c.state, "INSTANCE_STATE_"), text: (c) => bare(c.state, "INSTANCE_STATE_").toLowerCase(), tone: (c) => STATE_TONES[bare(c.state, "INSTANCE_STATE_")] },
    ],
  });
  table.update(ordered);
  return table.element;
}

/** Decide the same request on the same view under each policy with its default settings, one policy after the other. */
function otherPolicies(app, decision, closed) {
  const table = new Table({
    label: "Other policies",
    key: (row) => row.name,
    empty: "Loading …",
    columns: [
      { id: "policy", title: "Policy", value: (row) => row.name, note: (row) => row.summary },
      { id: "verdict", title: "Plan", pill: true, value: (row) => row.verdict, tone: (row) => ({ differs: "wait", same: "good" })[row.verdict] },
      { id: "to", title: "It would have gone to", address: true, value: (row) => row.to },
      { id: "mode", title: "Mode", value: (row) => row.mode },
      { id: "reason", title: "Reason", value: (row) => row.reason, note: (row) => meaningOf(row.reason) },
      { id: "cached", title: "Cached", unit: "tok, change", hint: "Compared with the recorded decision", num: true, value: (row) => row.cached, text: (row) => (row.cached === undefined ? "–" : signed(row.cached)) },
      { id: "summary", title: "What it does", value: (row) => row.summary, sortable: false, wrap: true },
    ],
  });
  const fill = async () => {
    const { policies = [] } = await app.call("ListPolicies");
    const rows = [];
    for (const { name, summary } of policies) {
      if (closed()) return;
      const answer = await app.call("WhatIf", { decisionId: decision.decisionId, policy: { name } });
      rows.push(revised(decision, answer, name, summary));
      table.update([...rows]);
    }
  };
  fill().catch(app.lost);
  const note = el("span", { className: "muted" }, "on the recorded view, each with its default settings");
  return el("div", { id: "others" }, el("h2", {}, "What other policies would have done ", note), table.element);
}

function revised(decision, answer, name, summary) {
  const change = answer.changes?.[0];
  const group = answer.groups?.[0];
  const recorded = name === decision.policy?.name ? `${name} (decided this)` : name;
  if (!change) return { name: recorded, verdict: "same", to: route(decision), mode: modeOf(decision).toLowerCase(), reason: group?.reason, cached: 0, summary };
  const to = [change.toPrefillInstanceId, change.toInstanceId].filter(Boolean).join(" → ");
  const cached = change.toInstanceId ? num(change.cachedTokensChange) : undefined;
  return { name: recorded, verdict: "differs", to: to || "held", mode: modeOf({ mode: change.toMode }).toLowerCase(), reason: change.reason, cached, summary };
}

/** Return how many tokens an instance has below its GPU. */
function loadTokens(kvLoad) {
  return num(kvLoad?.hostTokens) + num(kvLoad?.storageTokens);
}

/** Return from which tiers they are loaded, how long that takes, and how many tokens less count as cached for it. */
function loadNote(kvLoad) {
  if (!kvLoad) return "";
  const tiers = [[num(kvLoad.hostTokens), "host memory"], [num(kvLoad.storageTokens), "storage"]].filter(([tokens]) => tokens);
  const parts = tiers.map(([tokens, tier]) => `${count(tokens)} tok from ${tier}`).join(" and ");
  return `${parts}, in ${span(seconds(kvLoad.loadTime))}; counted ${count(kvLoad.priceTokens)} tok less for it`;
}

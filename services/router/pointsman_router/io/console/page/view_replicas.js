// The control plane: live and lost routers, owners of pools, and the health of the router that serves this page.

import { consoleOf, el, facts, pill, policyText } from "./dom.js";
import { age, count, moment, num, orNone, seconds, span } from "./format.js";
import { Table } from "./table.js";
import { stateOf } from "./view_fleet.js";
import { reasonText } from "./words.js";

// Age of a heartbeat above which a router is shown as quiet, s. Routers send four heartbeats per lease, which is 1 s by default; the store
// removes a router that is silent for a lease.
const QUIET_S = 1;
const orUnknown = (value, show = count) => (value === undefined ? "unknown" : show(value));

export function replicasView(app) {
  let pools = [];
  let thisReplica = {};
  let ours = null;
  const owned = (replica) => pools.filter((pool) => pool.owner?.routerId === replica.routerId).map((pool) => pool.model);
  const isThis = (replica) => replica.routerId === thisReplica.routerId;
  const members = (pool) => (app.fleet?.instances ?? []).filter((status) => status.instance.model === pool.model);
  const sum = (pool, get) => members(pool).reduce((total, status) => total + num(get(status)), 0);
  const isOurs = (pool) => pool.owner?.routerId === thisReplica.routerId;
  // A column that only the pool's owner knows: its open and held requests and the like.
  const here = (id, title, unit, hint, get) => ({ id, title, unit, hint, num: true, value: (p) => (isOurs(p) ? get(p) : undefined), text: (p) => (isOurs(p) ? count(get(p)) : "–"), note: (p) => (isOurs(p) ? "" : "Only its owner knows this"), shown: (rows) => rows.some(isOurs) });
  const routers = new Table({
    label: "Routers",
    key: (replica) => replica.routerId,
    tone: (replica) => (isThis(replica) ? "chosen" : ""),
    columns: [
      { id: "router", title: "Router", value: (r) => r.routerId },
      { id: "state", title: "State", pill: true, value: (r) => (isThis(r) ? "serves this page" : seconds(r.heartbeatAge) > QUIET_S ? "quiet" : "alive"), tone: (r) => (seconds(r.heartbeatAge) > QUIET_S ? "bad" : "good") },
      { id: "pools", title: "Places for", wrap: true, hint: "The pools that it owns", value: (r) => owned(r).join(", ") || "no pool" },
      { id: "open", title: "Open", unit: "req", num: true, hint: "Requests that it placed and that are not finished", value: (r) => r.openRequests, text: (r) => orUnknown(r.openRequests) },
      { id: "held", title: "Held", unit: "req", num: true, hint: "Requests that wait in it for a placement", value: (r) => r.heldRequests, text: (r) => orUnknown(r.heldRequests) },
      { id: "gateways", title: "Gateways", num: true, hint: "Gateways connected to it", value: (r) => r.gateways, text: (r) => orUnknown(r.gateways) },
      { id: "policy", title: "Policy", pill: true, value: (r) => r.policy?.name ?? "unknown", hint: "Red if it is not the fleet's, or differs from the policy of the router that serves this page", note: (r) => r.policyProblem || (r.policy ? policyText(r.policy) : ""), tone: (r) => (r.policyProblem || r.policy && ours && policyText(r.policy) !== policyText(ours) ? "bad" : "none") },
      { id: "version", title: "Version", value: (r) => r.version || "unknown" },
      { id: "started", title: "Up for", num: true, value: (r) => (r.startTime ? upFor(r) : undefined), text: (r) => orUnknown(r.startTime, () => span(upFor(r))) },
      { id: "heartbeat", title: "Heartbeat", unit: "ago", num: true, hint: "Age of its last heartbeat in the shared store", shown: (rows) => rows.some((r) => r.heartbeatAge !== undefined), value: (r) => seconds(r.heartbeatAge), text: (r) => (r.heartbeatAge === undefined ? "not shared" : age(seconds(r.heartbeatAge))), tone: (r) => (seconds(r.heartbeatAge) > QUIET_S ? "old" : "") },
      { id: "address", title: "Address", address: true, value: (r) => r.address ?? "" },
    ],
  });
  const lost = new Table({
    label: "Lost replicas",
    narrow: true,
    key: (replica) => replica.routerId,
    columns: [
      { id: "router", title: "Router", value: (r) => r.routerId },
      { id: "state", title: "State", pill: true, value: () => "lost", tone: () => "bad" },
      { id: "heartbeat", title: "Last heartbeat", unit: "ago", num: true, value: (r) => seconds(r.heartbeatAge), text: (r) => age(seconds(r.heartbeatAge)) },
    ],
  });
  const owners = new Table({
    label: "Pools",
    narrow: true,
    key: (pool) => pool.model,
    empty: "No pool: no instance is known.",
    columns: [
      { id: "model", title: "Model", value: (p) => p.model },
      { id: "owner", title: "Owner", value: (p) => p.owner?.routerId ?? "nobody", tone: (p) => (p.owner ? "none" : "bad"), pill: true },
      { id: "instances", title: "Instances", unit: "ready", num: true, value: (p) => num(p.instances), text: (p) => `${count(members(p).filter((status) => stateOf(status) === "READY").length)} of ${count(p.instances)}` },
      { id: "policy", title: "Policy", pill: true, hint: "The policy that decides for the pool; under auto, the one that it takes", value: (p) => p.policy?.name ?? "–", tone: () => "none", note: (p) => (p.policy ? takenText(p.policy) : "Only its owner knows this") },
      here("open", "Open", "req", "Requests placed and not finished", (p) => sum(p, (status) => status.numRequests)),
      here("held", "Held", "req", "Requests that wait for a placement", (p) => num(p.heldRequests)),
      here("parked", "Parked", "req", "New sessions that wait until the caches have room for them", (p) => num(p.parkedRequests)),
      here("pending", "To prefill", "tok", "Prompt tokens placed and not computed yet", (p) => sum(p, (status) => status.pendingPrefillTokens)),
      here("sessions", "Sessions", "", "Sessions with an owner", (p) => sum(p, (status) => status.sessions)),
      { id: "epoch", title: "Epoch", num: true, hint: "Grows with each change of the owner", value: (p) => p.owner?.epoch, text: (p) => (p.owner ? count(p.owner.epoch) : "none") },
    ],
  });
  const changes = new Table({
    label: "Changes of policies",
    narrow: true,
    key: (taken) => `${taken.time} ${taken.model}`,
    columns: [
      { id: "time", title: "Time", value: (taken) => taken.time, text: (taken) => moment(taken.time) },
      { id: "model", title: "Model", value: (taken) => taken.model },
      { id: "policy", title: "Policy", pill: true, value: (taken) => taken.name, tone: () => "none" },
      { id: "reason", title: "Reason", wrap: true, value: (taken) => (taken.reason ? reasonText(taken.reason) : "operators chose it") },
      { id: "before", title: "Before", wrap: true, value: (taken) => [taken.nameBefore, taken.reasonBefore && `(${reasonText(taken.reasonBefore)})`].filter(Boolean).join(" ") },
    ],
  });
  const changed = el("section", { hidden: true }, el("h2", {}, "Changes of policies ", el("span", { className: "muted" }, "of the pools that this router owns, newest first")), changes.element);
  const missing = el("section", { hidden: true }, el("h2", {}, "Lost ", el("span", { className: "muted" }, "routers that ended without deregistering in the last day and were not replaced")), lost.element);
  const consoles = el("p", { className: "muted", hidden: true });
  const own = el("div", {});
  const element = el("section", {}, el("div", { className: "head" }, el("h1", { tabIndex: -1 }, "Replicas")), missing, routers.element, consoles, el("h2", {}, "Pools"), owners.element, changed, own);
  const refresh = async () => {
    // Requested together with the fleet.
    const answer = app.replicas;
    if (!answer) return;
    const replicas = answer.replicas ?? [];
    pools = answer.pools ?? [];
    thisReplica = answer.thisReplica ?? {};
    ours = replicas.find(isThis)?.policy;
    routers.update(replicas);
    owners.update(pools);
    changes.update(answer.policyChanges ?? []);
    changed.hidden = !answer.policyChanges?.length;
    lost.update(answer.lostReplicas ?? []);
    missing.hidden = !answer.lostReplicas?.length;
    showConsoles(consoles, replicas.filter((replica) => !isThis(replica)), replicas);
    own.replaceChildren(health(thisReplica));
  };
  return { element, title: "Replicas", refresh };
}

/** Why the policy decides for a pool, and what is known of the pool. */
function takenText(policy) {
  const known = `of ${count(policy.readyInstances)} ready instances ${count(policy.exactInstances)} report KV events, ${count(policy.learnedInstances)} have a learned prefill curve; the mean prefill costs ${num(policy.meanCost).toPrecision(2)} times that of a new prompt of 5,000 tokens`;
  const since = policy.age === undefined ? "" : `for ${span(seconds(policy.age))}; `;
  const asked = policy.askedName ? `; this asks for ${policy.askedName} (${reasonText(policy.askedReason)}), which is taken if it lasts` : "";
  return policy.reason ? `${since}${reasonText(policy.reason)}; ${known}${asked}` : known;
}

const upFor = (replica) => Math.max(Date.now() - new Date(replica.startTime).getTime(), 0) / 1000;

/** Show links to the other routers' consoles that this browser can probably reach. */
function showConsoles(line, others, replicas) {
  const links = others.map((replica) => consoleOf({ routerId: replica.routerId, address: replica.address ?? "" }, replicas)).filter((link) => typeof link !== "string");
  const whole = links.map((link) => link.outerHTML).join();
  line.hidden = !links.length;
  if (line.dataset.shown === whole) return;
  line.dataset.shown = whole;
  line.replaceChildren("Their consoles: ", ...links.flatMap((link, number) => (number ? [", ", link] : [link])));
}

function health(router) {
  const shared = router.store === "redis";
  const store = !shared ? "memory of this process, not shared" : router.degraded ? "Redis does not answer: placing by its own view" : `Redis, answered ${span(seconds(router.storeAnswerAge))} ago`;
  const part = (title, pairs) => el("div", {}, el("h2", {}, title), facts(pairs));
  return el(
    "div", { className: "columns" },
    part(`This router, ${router.routerId}`, [
      ["Placing", pill(router.ready ? "ready" : "starting", router.ready ? "good" : "wait")],
      ["Store", router.degraded ? pill(store, "bad") : store],
      ["Up for", span(seconds(router.uptime))],
      ["Version", orNone(router.version)],
    ]),
    part("Connected to it", [
      ["Gateways", count(router.gateways)],
      ["Agents' streams", `${count(router.agentStreams)}, one for each instance`],
      ["Open requests", count(router.openRequests)],
      ["Held requests", count(router.heldRequests)],
      ["Parked requests", count(router.parkedRequests)],
    ]),
    part("What it knows", [
      ["Sessions", count(router.sessions)],
      ["Keys in the index", `${count(router.keys)} × 16 tok`],
      ["Decisions in the log", count(router.decisions)],
    ]),
  );
}

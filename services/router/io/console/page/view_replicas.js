// The control plane itself: the live routers, who owns which pool, and how the one that serves this page is.

import { el, facts, pill, policyText } from "./dom.js";
import { age, count, num, orNone, seconds, span } from "./format.js";
import { Table } from "./table.js";

// Replicas send a heartbeat four times in a lease, 1 s by default; the store forgets those silent for a lease.
const QUIET_S = 1;

export function replicasView(app) {
  let pools = [];
  let thisReplica = {};
  let ours = null;
  const owned = (replica) => pools.filter((pool) => pool.owner?.routerId === replica.routerId).map((pool) => pool.model);
  const routers = new Table({
    label: "Routers",
    narrow: true,
    key: (one) => one.routerId,
    tone: (one) => (one.routerId === thisReplica.routerId ? "chosen" : ""),
    columns: [
      { id: "router", title: "Router", value: (r) => r.routerId },
      { id: "here", title: "", pill: true, value: (r) => (r.lost ? "lost" : r.routerId === thisReplica.routerId ? "serves this page" : ""), tone: (r) => (r.lost ? "bad" : r.routerId === thisReplica.routerId ? "wait" : "none"), hint: "Lost: it ended without notice in the last day, and no other router has joined in its place", sortable: false },
      { id: "address", title: "Address", value: (r) => r.address ?? "" },
      { id: "policy", title: "Policy", value: (r) => r.policy?.name ?? "not told", hint: "Red where it is not that of the router that serves this page", text: (r) => (r.policy ? r.policy.name : "not told"), pill: true, tone: (r) => (r.policy && ours && policyText(r.policy) !== policyText(ours) ? "bad" : "none") },
      { id: "pools", title: "Owns", value: (r) => orNone(owned(r).join(", ")) },
      { id: "heartbeat", title: "Heartbeat", unit: "ago", num: true, value: (r) => seconds(r.heartbeatAge), text: (r) => (r.heartbeatAge === undefined ? "not shared" : age(seconds(r.heartbeatAge))), tone: (r) => (seconds(r.heartbeatAge) > QUIET_S ? "old" : "") },
    ],
  });
  const owners = new Table({
    label: "Pools",
    narrow: true,
    key: (one) => one.model,
    empty: "No pool: no instance is known.",
    columns: [
      { id: "model", title: "Model", value: (p) => p.model },
      { id: "owner", title: "Owner", value: (p) => p.owner?.routerId ?? "nobody", tone: (p) => (p.owner ? "none" : "bad"), pill: true },
      { id: "epoch", title: "Epoch", num: true, hint: "Grows with each change of hands", value: (p) => num(p.owner?.epoch), text: (p) => count(p.owner?.epoch) },
      { id: "instances", title: "Instances", num: true, value: (p) => num(p.instances), text: (p) => count(p.instances) },
      { id: "held", title: "Held here", unit: "req", num: true, value: (p) => num(p.heldRequests), text: (p) => count(p.heldRequests) },
    ],
  });
  const own = el("div", {});
  const element = el("section", {}, el("div", { className: "head" }, el("h1", { tabIndex: -1 }, "Replicas")), routers.element, el("h2", {}, "Pools"), owners.element, el("h2", {}, "This router"), own);
  const refresh = async () => {
    // Asked for with the fleet.
    const answer = app.replicas;
    if (!answer) return;
    pools = answer.pools ?? [];
    thisReplica = answer.thisReplica ?? {};
    ours = (answer.replicas ?? []).find((one) => one.routerId === thisReplica.routerId)?.policy;
    routers.update([...(answer.replicas ?? []), ...(answer.lostReplicas ?? []).map((one) => ({ ...one, lost: true }))]);
    owners.update(pools);
    own.replaceChildren(health(thisReplica));
  };
  return { element, title: "Replicas", refresh };
}

function health(router) {
  const shared = router.store === "redis";
  const store = !shared ? "this process's memory; nothing is shared" : router.degraded ? "Redis is away: placing on its own view" : `Redis, answered ${span(seconds(router.storeAnswerAge))} ago`;
  return facts([
    ["Router", router.routerId],
    ["Up for", span(seconds(router.uptime))],
    ["Placing", pill(router.ready ? "ready" : "starting", router.ready ? "good" : "wait")],
    ["Store", router.degraded ? pill(store, "bad") : store],
    ["Gateways connected", count(router.gateways)],
    ["Agents' streams", `${count(router.agentStreams)}, one for each instance`],
    ["Open requests", count(router.openRequests)],
    ["Held requests", count(router.heldRequests)],
    ["Sessions", count(router.sessions)],
    ["Keys in the index", `${count(router.keys)} × 16 tok`],
    ["Decisions in the log", count(router.decisions)],
  ]);
}

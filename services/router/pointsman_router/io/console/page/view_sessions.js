// Sessions with their owners, most recently used first, and the turns of each that are in the router's log.

import { el, setText } from "./dom.js";
import { age, clock, count, num, orNone, percent, seconds, span } from "./format.js";
import { filterBox, Table, varied } from "./table.js";
import { instanceHref } from "./view_fleet.js";

// Undefined for a session without a turn in the log.
const counted = (get) => (s) => (num(s.turns) ? num(get(s)) : undefined);
const amount = (id, title, unit, hint, get) => ({ id, title, unit, hint, num: true, value: counted(get), text: (s) => (num(s.turns) ? count(get(s)) : "–") });
const cachedShare = (s) => (num(s.inputTokens) ? num(s.cachedTokens) / num(s.inputTokens) : undefined);

export const SESSION_COLUMNS = [
  { id: "session", title: "Session", value: (s) => s.sessionId, href: (s) => `#/decisions?session=${encodeURIComponent(s.sessionId)}`, note: () => "Its decisions" },
  { id: "idle", title: "Last seen", unit: "ago", num: true, hint: "Since its last placement", value: (s) => seconds(s.idle), text: (s) => age(seconds(s.idle)) },
  amount("turns", "Turns", "", "Number of its requests in this router's decision log", (s) => s.turns),
  amount("context", "Newest input", "tok", "Input tokens of the newest turn", (s) => s.lastInputTokens),
  amount("input", "Input", "tok, all turns", "Input tokens of all these turns", (s) => s.inputTokens),
  { id: "cached", title: "Cached", unit: "%", num: true, hint: "Share of the input of all these turns, as reported by engines or, if not reported, as predicted", value: cachedShare, text: (s) => percent(cachedShare(s)), share: cachedShare },
  { id: "owner", title: "Owner", address: true, hint: "The instance of the last turn", value: (s) => s.instanceId, href: (s) => instanceHref(s.instanceId) },
  { id: "tenant", title: "Tenant", name: true, shown: varied((s) => s.tenant ?? ""), value: (s) => orNone(s.tenant) },
  { id: "model", title: "Model", name: true, shown: varied((s) => s.model), value: (s) => s.model },
];

export function sessionsView(app, query) {
  const table = new Table({ label: "Sessions", narrow: true, address: { query, keep: app.keep }, columns: SESSION_COLUMNS, key: (s) => `${s.model} ${s.tenant ?? ""}/${s.sessionId}`, empty: "No session has an owner yet. A request with a session id creates one." });
  const total = el("span", { className: "muted" });
  const instance = query.get("instance") ?? "";
  let text = query.get("filter") ?? "";
  const refresh = async () => {
    const answer = await app.call("ListSessions", { text, instanceId: instance, pageSize: 1000 });
    const listed = answer.sessions ?? [];
    table.update(listed);
    const shown = listed.length < num(answer.total) ? `the ${count(listed.length)} most recent that match, of ` : "";
    const since = answer.countedSince ? `; turns are counted since ${clock(answer.countedSince)}, the begin of this router's decision log` : "";
    const ended = num(answer.ended) ? `; clients have ended ${count(answer.ended)} since this router started` : "";
    setText(total, `${shown}${count(answer.total)}; an owner expires ${span(seconds(answer.timeToLive))} after the last placement${ended}${since}`);
  };
  const filter = filterBox("Filter: part of TENANT/SESSION", (given) => {
    text = given.trim();
    app.keep({ filter: text });
    refresh().catch(app.lost);
  });
  filter.value = text;
  const element = el("section", {}, el("div", { className: "head" }, el("h1", { tabIndex: -1 }, instance ? `Sessions of ${instance}` : "Sessions"), filter, total), table.element);
  return { element, title: "Sessions", refresh };
}

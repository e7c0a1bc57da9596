// Sessions and the instances that own them, the lately used first, with their turns as far as the router's log goes.

import { el, setText } from "./dom.js";
import { age, clock, count, num, orNone, percent, seconds, span } from "./format.js";
import { filterBox, Table, varied } from "./table.js";
import { instanceHref } from "./view_fleet.js";

// Of sessions whose turns have left the log nothing is known.
const counted = (get) => (s) => (num(s.turns) ? num(get(s)) : undefined);
const amount = (id, title, unit, hint, get) => ({ id, title, unit, hint, num: true, value: counted(get), text: (s) => (num(s.turns) ? count(get(s)) : "–") });
const cachedShare = (s) => (num(s.inputTokens) ? num(s.cachedTokens) / num(s.inputTokens) : undefined);

export const SESSION_COLUMNS = [
  { id: "session", title: "Session", value: (s) => s.sessionId, href: (s) => `#/decisions?session=${encodeURIComponent(s.sessionId)}`, note: () => "Its decisions" },
  { id: "idle", title: "Last seen", unit: "ago", num: true, hint: "Since its last placement", value: (s) => seconds(s.idle), text: (s) => age(seconds(s.idle)) },
  amount("turns", "Turns", "", "Its requests in this router's log of decisions", (s) => s.turns),
  amount("context", "Newest input", "tok", "Prompt of the newest turn", (s) => s.lastInputTokens),
  amount("input", "Input", "tok, all turns", "Prompts of all these turns", (s) => s.inputTokens),
  { id: "cached", title: "Cached", unit: "%", num: true, hint: "Of the input of all these turns: as engines told it, else as predicted", value: cachedShare, text: (s) => percent(cachedShare(s)), share: cachedShare },
  { id: "owner", title: "Owner", address: true, hint: "The instance that the last turn went to", value: (s) => s.instanceId, href: (s) => instanceHref(s.instanceId) },
  { id: "tenant", title: "Tenant", name: true, shown: varied((s) => s.tenant ?? ""), value: (s) => orNone(s.tenant) },
  { id: "model", title: "Model", name: true, shown: varied((s) => s.model), value: (s) => s.model },
];

export function sessionsView(app, query) {
  const table = new Table({ label: "Sessions", narrow: true, columns: SESSION_COLUMNS, key: (s) => `${s.model} ${s.tenant ?? ""}/${s.sessionId}`, empty: "No session has an owner: requests that name a session get one." });
  const total = el("span", { className: "muted" });
  const instance = query.get("instance") ?? "";
  let text = "";
  const refresh = async () => {
    const answer = await app.call("ListSessions", { text, instanceId: instance, pageSize: 1000 });
    const listed = answer.sessions ?? [];
    table.update(listed);
    const shown = listed.length < num(answer.total) ? `the ${count(listed.length)} lately placed that match, of ` : "";
    const since = answer.countedSince ? `; turns are counted since ${clock(answer.countedSince)}, as far back as this router's log of decisions goes` : "";
    setText(total, `${shown}${count(answer.total)}; an owner is forgotten ${span(seconds(answer.timeToLive))} after the last placement${since}`);
  };
  const filter = filterBox("Filter: part of TENANT/SESSION", (given) => {
    text = given.trim();
    refresh().catch(app.lost);
  });
  const element = el("section", {}, el("div", { className: "head" }, el("h1", { tabIndex: -1 }, instance ? `Sessions of ${instance}` : "Sessions"), filter, total), table.element);
  return { element, title: "Sessions", refresh };
}

// Sessions and the instances that own them, the lately used first.

import { el, setText } from "./dom.js";
import { age, count, num, orNone, seconds, span } from "./format.js";
import { filterBox, Table } from "./table.js";
import { instanceHref } from "./view_fleet.js";

export const SESSION_COLUMNS = [
  { id: "session", title: "Session", value: (s) => s.sessionId, href: (s) => `#/decisions?session=${encodeURIComponent(s.sessionId)}`, note: () => "Its decisions" },
  { id: "tenant", title: "Tenant", value: (s) => orNone(s.tenant) },
  { id: "model", title: "Model", value: (s) => s.model },
  { id: "owner", title: "Owner", value: (s) => s.instanceId, href: (s) => instanceHref(s.instanceId) },
  { id: "idle", title: "Last placed", unit: "ago", num: true, value: (s) => seconds(s.idle), text: (s) => age(seconds(s.idle)) },
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
    setText(total, `${shown}${count(answer.total)}; an owner is forgotten ${span(seconds(answer.timeToLive))} after the last placement`);
  };
  const filter = filterBox("Filter: part of TENANT/SESSION", (given) => {
    text = given.trim();
    refresh().catch(app.lost);
  });
  const element = el("section", {}, el("div", { className: "head" }, el("h1", { tabIndex: -1 }, instance ? `Sessions of ${instance}` : "Sessions"), filter, total), table.element);
  return { element, title: "Sessions", refresh };
}

// The page's state and its polling: the user's role, the current view, and the time of the router's last response.

import * as api from "./api.js";
import { consoleOf, el, link, policyText, say, setText } from "./dom.js";
import { Feed } from "./feed.js";
import { span } from "./format.js";
import { askToken, askPolicy } from "./operate.js";
import { decisionsView } from "./view_decisions.js";
import { fleetView } from "./view_fleet.js";
import { historyView } from "./view_history.js";
import { instanceView } from "./view_instance.js";
import { outcomesView } from "./view_outcomes.js";
import { replicasView } from "./view_replicas.js";
import { sessionsView } from "./view_sessions.js";
import { whyView } from "./view_why.js";
import { learnWords } from "./words.js";

const at = (id) => document.getElementById(id);
const main = at("main");
// [list view, detail view] by the first part of the address. The detail view is for addresses with a second part.
const VIEWS = { fleet: [fleetView, instanceView], history: [historyView], decisions: [decisionsView, whyView], sessions: [sessionsView], outcomes: [outcomesView], replicas: [replicasView] };

const NOBODY = { role: "", open: false, read: false, operate: false };
const SIGNED_OUT = "SIGNED_OUT";

const app = {
  who: NOBODY,
  fleet: null,
  replicas: null,
  heardAt: 0,
  trouble: "",
  /** Call a method. A 401 response updates the user's role. After a sign-out, calls are not sent and earlier responses are dropped. */
  async call(method, request) {
    const { who } = app;
    if (!who.read) throw new api.CallError(0, SIGNED_OUT, "Signed out.");
    try {
      const answer = await api.call(method, request);
      if (app.who.role === who.role) return answer;
    } catch (error) {
      if (error.status === 401) await identify();
      throw error;
    }
    throw new api.CallError(0, SIGNED_OUT, "Signed out.");
  },
  /** All pages of a list: the first response, with the `entries` of all pages. */
  async list(method, entries) {
    const whole = await app.call(method);
    for (let token = whole.nextPageToken; token;) {
      const page = await app.call(method, { pageToken: token });
      (whole[entries] ??= []).push(...(page[entries] ?? []));
      token = page.nextPageToken;
    }
    return whole;
  },
  refresh: () => poll(),
  lost,
  /** Keep how a view is sorted and filtered in the page's address, without an entry in the browser's history. "" removes a value. */
  keep(changes) {
    const [path, query = ""] = (location.hash || "#/fleet").split("?");
    const values = new URLSearchParams(query);
    for (const [name, value] of Object.entries(changes)) {
      if (value) values.set(name, value);
      else values.delete(name);
    }
    history.replaceState(null, "", `${path}${values.toString() && "?"}${values}`);
    route = location.hash;
    lists[path] = route;
  },
  /** The last address of the list with this path, with its order and filter. */
  addressOf: (path) => lists[path] ?? path,
};
app.feed = new Feed(app);

let view = null;
let route = "";
// The last address of each list, with its order and filter, by its path.
const lists = {};

async function identify() {
  try {
    app.who = await api.role();
  } catch (error) {
    lost(error);
    return;
  }
  const { role, open, read } = app.who;
  setText(at("account"), role ? `Sign out (${role})` : "Sign in");
  at("account").hidden = open;
  at("policy").disabled = !app.who.operate;
  if (read) {
    app.feed.start();
    await learnWords(app).catch(lost);
  } else app.feed.stop();
  show(true);
}

/** Show the error of a call. An error of the page itself is also reported to the browser. */
function lost(error) {
  if (error.code === SIGNED_OUT) return;
  app.trouble = error instanceof api.CallError ? error.message : "This page has failed. Reload it.";
  if (!(error instanceof api.CallError)) reportError(error);
  tick();
}

/** Request the fleet, then let the view request what it shows. */
let polling = false;
async function poll() {
  if (polling || document.hidden) return;
  polling = true;
  try {
    if (!app.who.read) {
      if (app.trouble) await identify();
    } else {
      [app.fleet, app.replicas] = [await app.list("ListInstances", "instances"), await app.call("ListReplicas")];
      app.heardAt = Date.now();
      app.trouble = "";
      setText(at("router"), app.fleet.routerId ?? "");
      setText(at("policy"), `policy ${app.fleet.policy?.name ?? "?"}`);
      at("policy").hidden = false;
      tellElsewhere();
      await view?.refresh?.();
    }
  } catch (error) {
    lost(error);
  } finally {
    polling = false;
    tick();
  }
}

/** Show what this router does not know: the pools that other routers own, with links to their consoles; and whether policies differ. */
function tellElsewhere() {
  const { thisReplica = {}, replicas = [], pools = [] } = app.replicas;
  const others = pools.filter((pool) => pool.owner && pool.owner.routerId !== thisReplica.routerId);
  const policies = new Set(replicas.filter((replica) => replica.policy).map((replica) => policyText(replica.policy)));
  const said = [];
  if (replicas.length > 1) said.push(`This is what ${thisReplica.routerId} sees, one router of ${replicas.length}. `);
  if (others.length) {
    said.push("Placed by another router, the only one that knows the requests, sessions and decisions: ");
    others.forEach((pool, number) => said.push(number ? ", " : "", `${pool.model} by `, consoleOf(pool.owner, replicas)));
    said.push(". ");
  }
  if (policies.size > 1) said.push("The routers do not place by the same policy. ", link("#/replicas", "See Replicas"), ".");
  for (const { routerId, policyProblem } of replicas.filter((replica) => replica.policyProblem)) said.push(` ${routerId} does not place by the fleet's policy: ${policyProblem}.`);
  const whole = said.map((part) => part.outerHTML ?? part).join("");
  if (at("elsewhere").dataset.shown !== whole) {
    at("elsewhere").dataset.shown = whole;
    at("elsewhere").replaceChildren(...said);
  }
  at("elsewhere").hidden = !said.length;
}

/** Show the age of the data, every second, with an alert once it is too old. */
function tick() {
  const age = (Date.now() - app.heardAt) / 1000;
  const stale = app.heardAt > 0 && age > 3 * interval() / 1000;
  document.body.dataset.stale = stale;
  const live = at("live");
  live.dataset.state = !app.who.read ? "off" : stale || app.trouble ? "bad" : app.heardAt ? "good" : "wait";
  setText(live, !app.who.read ? "signed out" : !app.heardAt ? "connecting" : age < 1.5 * interval() / 1000 ? "live" : `${span(Math.floor(age))} old`);
  const trouble = app.trouble && (stale ? `${app.trouble} What you see is ${span(Math.floor(age))} old.` : app.trouble);
  setText(at("trouble"), trouble);
  at("trouble").hidden = !trouble;
}

/** Polling interval, ms. A large fleet is polled less often, because each instance costs the router about 0.2 ms. */
const interval = () => 2000 + 4 * (app.fleet?.instances?.length ?? 0);

async function clockwork() {
  await poll();
  setTimeout(clockwork, interval());
}

function unescaped(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text; // The address was truncated.
  }
}

function show(anew = false) {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const [name, ...rest] = (path || "fleet").split("/");
  const id = unescaped(rest.join("/"));
  for (const link of at("nav").children) {
    if (link.hash === `#/${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (!anew && route === location.hash) return;
  const moved = route !== "" && route !== location.hash;
  route = location.hash;
  view?.close?.();
  if (!app.who.read) {
    view = null;
    const text = app.who.role ? `The ${app.who.role} role may not see the fleet.` : "Sign in with an operator's, an observer's or a gateway's token to see the fleet.";
    main.replaceChildren(el("p", { className: "empty" }, text));
    return;
  }
  if (!Object.hasOwn(VIEWS, name)) {
    view = null;
    main.replaceChildren(el("p", { className: "empty" }, `There is no page ${name}. `, link("#/fleet", "See Fleet")));
    return;
  }
  const [list, details] = VIEWS[name];
  view = id && details ? details(app, id) : list(app, new URLSearchParams(query));
  if (!id) lists[`#/${name}`] = route;
  main.replaceChildren(view.element);
  document.title = `${view.title} – Pointsman`;
  view.refresh?.()?.catch?.(lost);
  if (moved) (main.querySelector("h1") ?? main).focus();
}

at("account").addEventListener("click", () => {
  if (app.who.role) {
    api.signOut();
    app.who = NOBODY;
    app.feed.stop();
    app.fleet = null;
    app.heardAt = 0;
    at("elsewhere").hidden = true;
    say("Signed out.");
    identify().then(tick);
  } else {
    askToken(async (token, keep) => {
      api.signIn(token, keep);
      const who = await api.role();
      if (!who.role) {
        api.signOut();
        throw new Error("No role has this token.");
      }
      say(`Signed in as ${who.role}.`);
      await identify();
      await poll();
    });
  }
});
at("policy").addEventListener("click", () => askPolicy(app));
at("skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
window.addEventListener("hashchange", () => show());
document.addEventListener("visibilitychange", () => !document.hidden && poll());
document.addEventListener("keydown", (event) => {
  const typing = event.target.closest("input, textarea, select, dialog");
  if (event.key === "/" && !typing) {
    event.preventDefault();
    main.querySelector("input.filter")?.focus();
  } else if (event.key === "Escape" && !document.querySelector("dialog") && view?.up) {
    location.hash = app.addressOf(view.up);
  }
});
setInterval(tick, 1000);
identify().then(clockwork);

// Dialogs of operators: sign in, drain and cordon instances, change their weights, change the policy.

import { ask, el, say } from "./dom.js";

export function askToken(enter) {
  const token = el("input", { type: "password", autocomplete: "off", required: true, spellcheck: false });
  const keep = el("input", { type: "checkbox" });
  ask(
    "Sign in",
    [
      el("p", { className: "muted" }, "An observer's or a gateway's token may read. An operator's token may also drain and cordon instances and change the policy."),
      el("label", {}, "Token", token),
      el("label", { className: "check" }, keep, "Remember it in this tab"),
    ],
    "Sign in",
    () => enter(token.value.trim(), keep.checked),
  );
}

export function askDrain(app, status) {
  const id = status.instance.instanceId;
  const resume = status.state === "INSTANCE_STATE_DRAINING";
  const text = resume ? "New requests are placed on it again." : `No new requests are placed on it until its engine restarts. Its ${status.numRequests ?? 0} open requests continue.`;
  ask(resume ? `Resume ${id}?` : `Drain ${id}?`, [el("p", {}, text), resume ? null : lastOf(app, status)], resume ? "Resume" : "Drain", async () => {
    const { thisReplicaOnly } = await app.call("Drain", { instanceId: id, resume });
    say((resume ? `${id} receives requests again.` : `${id} is draining.`) + alone(thisReplicaOnly));
    await app.refresh();
  });
}

export function askCordon(app, status) {
  const { instanceId } = status.instance;
  const cordoned = !status.cordoned;
  const reason = el("input", { maxLength: 300 });
  const text = cordoned ? `No new requests are placed on it until the cordon is lifted, also after a restart. Its ${status.numRequests ?? 0} open requests continue.` : "New requests are placed on it again.";
  const parts = [el("p", {}, text), ...(cordoned ? [lastOf(app, status), el("label", {}, "Reason", reason)] : [])];
  ask(`${cordoned ? "Cordon" : "Uncordon"} ${instanceId}?`, parts, cordoned ? "Cordon" : "Uncordon", async () => {
    const { thisReplicaOnly } = await app.call("SetInstanceOrder", { instanceId, cordoned, ...(reason.value.trim() ? { reason: reason.value.trim() } : {}) });
    say(`${instanceId} is ${cordoned ? "cordoned" : "uncordoned"}.${alone(thisReplicaOnly)}`);
    await app.refresh();
  });
}

export function askLift(app, { instanceId }, lifted) {
  const text = "No agent reports an instance with this id. If one appears later, requests are placed on it as on any other.";
  ask(`Lift all orders for ${instanceId}?`, [el("p", {}, text)], "Lift", async () => {
    const { thisReplicaOnly } = await app.call("SetInstanceOrder", { instanceId, cordoned: false, weight: 1 });
    lifted();
    say(`All orders for ${instanceId} are lifted.${alone(thisReplicaOnly)}`);
    await app.refresh();
  });
}

export function askWeight(app, status) {
  const { instanceId } = status.instance;
  const input = el("input", { value: String(status.weight ?? 1), inputMode: "decimal", required: true });
  const text = "The part of its fair share of new sessions that it receives. 1: all; 0: none. Sessions that it owns stay.";
  ask(`Weight of ${instanceId}`, [el("p", {}, text), el("label", {}, "Weight, 0 to 1", input)], "Change", async () => {
    const weight = Number(input.value);
    const { thisReplicaOnly } = await app.call("SetInstanceOrder", { instanceId, weight });
    say(`${instanceId} has weight ${weight} now.${alone(thisReplicaOnly)}`);
    await app.refresh();
  });
}

/** Show a form of the policies and their settings, filled with the policy in force. */
export async function askPolicy(app) {
  const { policies } = await app.call("ListPolicies");
  // The etag of the policy that the form shows: the change fails if somebody else changes the policy in the meantime.
  const { policy: inForce, policyEtag: etag } = app.fleet;
  const summary = el("p", { className: "muted" });
  const settings = el("div", { className: "settings" });
  let inputs = [];
  const choose = el("select", { onchange: () => fill() }, ...policies.map(({ name }) => el("option", { value: name, selected: name === inForce.name }, name)));
  const fill = () => {
    const policy = policies.find(({ name }) => name === choose.value);
    summary.textContent = policy.summary;
    inputs = (policy.settings ?? []).map((setting) => settingInput(setting, policy.name === inForce.name ? inForce.settings?.[setting.name] : undefined));
    settings.replaceChildren(...inputs.map(({ row }) => row));
  };
  fill();
  ask("Change the policy", [el("label", {}, "Policy", choose), summary, settings], "Change", async () => {
    const given = Object.fromEntries(inputs.map(({ name, read }) => [name, read()]));
    const { thisReplicaOnly } = await app.call("SetPolicy", { policy: { name: choose.value, settings: given }, etag });
    say(`The policy is ${choose.value} now.${alone(thisReplicaOnly)}`);
    await app.refresh();
  });
}

/** A warning if no other instance of the pool can answer; else null. Those that only produce KV can where the pool has no others. */
function lastOf(app, { instance }) {
  const pool = (app.fleet?.instances ?? []).filter((other) => other.instance.model === instance.model);
  const others = pool.filter((other) => other.instance.kvTransfer?.role !== "KV_ROLE_PRODUCER");
  const takes = (others.length ? others : pool).some((other) => other.instance.instanceId !== instance.instanceId && ["INSTANCE_STATE_READY", "INSTANCE_STATE_SYNCING"].includes(other.state));
  return takes ? null : el("p", { className: "bad", role: "alert" }, `No other instance of ${instance.model} can answer: new requests for it may get 503.`);
}

function alone(thisReplicaOnly) {
  return thisReplicaOnly ? " Other routers apply it when Redis answers again." : "";
}

function settingInput({ name, defaultValue, bounds, meaning }, now) {
  const value = now ?? defaultValue;
  const note = el("span", { className: "muted" }, `${meaning} (${bounds}; default ${defaultValue})`);
  if (typeof defaultValue === "boolean") {
    const box = el("input", { type: "checkbox", checked: value });
    return { name, read: () => box.checked, row: el("label", { className: "check" }, box, name, note) };
  }
  const box = el("input", { value: String(value), inputMode: typeof defaultValue === "number" ? "decimal" : "text" });
  return { name, read: () => (typeof defaultValue === "number" ? Number(box.value) : box.value), row: el("label", {}, name, box, note) };
}

// What an operator may do: sign in, drain and cordon instances, give them weights, change the policy.

import { ask, el, say } from "./dom.js";

export function askToken(enter) {
  const token = el("input", { type: "password", autocomplete: "off", required: true, spellcheck: false });
  const keep = el("input", { type: "checkbox" });
  ask(
    "Sign in",
    [
      el("p", { className: "muted" }, "An observer's or a gateway's token may read; an operator's may also take instances out and change the policy."),
      el("label", {}, "Token", token),
      el("label", { className: "check" }, keep, "Keep it for this tab, over reloads"),
    ],
    "Sign in",
    () => enter(token.value.trim(), keep.checked),
  );
}

export function askDrain(app, status) {
  const id = status.instance.instanceId;
  const resume = status.state === "INSTANCE_STATE_DRAINING";
  const text = resume ? "It gets new requests again." : `It gets no new requests until its engine restarts; the ${status.numRequests ?? 0} open ones go on to their end.`;
  ask(resume ? `Resume ${id}?` : `Drain ${id}?`, [el("p", {}, text)], resume ? "Resume" : "Drain", async () => {
    const { thisReplicaOnly } = await app.call("Drain", { instanceId: id, resume });
    say((resume ? `${id} takes requests again.` : `${id} is draining.`) + alone(thisReplicaOnly));
    await app.refresh();
  });
}

export function askCordon(app, status) {
  const { instanceId } = status.instance;
  const cordoned = !status.cordoned;
  const reason = el("input", { maxLength: 300 });
  const text = cordoned ? `It gets no new requests until it is let in again, also after a restart; the ${status.numRequests ?? 0} open ones go on to their end.` : "It gets new requests again.";
  const parts = [el("p", {}, text), ...(cordoned ? [el("label", {}, "Reason", reason)] : [])];
  ask(`${cordoned ? "Cordon" : "Uncordon"} ${instanceId}?`, parts, cordoned ? "Cordon" : "Uncordon", async () => {
    const { thisReplicaOnly } = await app.call("SetInstanceOrder", { instanceId, cordoned, ...(reason.value.trim() ? { reason: reason.value.trim() } : {}) });
    say(`${instanceId} is ${cordoned ? "cordoned" : "let in again"}.${alone(thisReplicaOnly)}`);
    await app.refresh();
  });
}

export function askLift(app, { instanceId }, lifted) {
  const text = "No agent reports an instance of this id. One that comes under it later gets requests as any other.";
  ask(`Lift all orders for ${instanceId}?`, [el("p", {}, text)], "Lift", async () => {
    const { thisReplicaOnly } = await app.call("SetInstanceOrder", { instanceId, cordoned: false, weight: 1 });
    lifted();
    say(`Nothing is ordered for ${instanceId} any more.${alone(thisReplicaOnly)}`);
    await app.refresh();
  });
}

export function askWeight(app, status) {
  const { instanceId } = status.instance;
  const input = el("input", { value: String(status.weight ?? 1), inputMode: "decimal", required: true });
  const text = "The part of its fair share of new sessions that it gets: 1 is all, 0 none. Sessions that live there stay.";
  ask(`Weight of ${instanceId}`, [el("p", {}, text), el("label", {}, "Weight, 0 to 1", input)], "Change", async () => {
    const weight = Number(input.value);
    const { thisReplicaOnly } = await app.call("SetInstanceOrder", { instanceId, weight });
    say(`${instanceId} has weight ${weight} now.${alone(thisReplicaOnly)}`);
    await app.refresh();
  });
}

/** A form of the policies and their settings; those in force are filled in. */
export async function askPolicy(app) {
  const { policies } = await app.call("ListPolicies");
  // As it is while the form is filled in: a change by somebody else meanwhile must not be undone unseen.
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

function alone(thisReplicaOnly) {
  return thisReplicaOnly ? " Other routers follow when Redis is back." : "";
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

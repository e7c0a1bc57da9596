// Creates elements from text and nodes. No code of the page parses text as markup.

/** Create an element. `with_`: properties ("class", "data-…", "aria-…" and unknown names become attributes) and `on…` listeners. */
export function el(tag, with_ = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(with_)) {
    if (value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name in node && !name.includes("-")) node[name] = value;
    else node.setAttribute(name === "className" ? "class" : name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== undefined && child !== null));
  return node;
}

/** Set a node's text only if it differs, so that selections and screen readers are not disturbed. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** A <dl> of [name, text or node] pairs, without pairs that have no value. */
export function facts(pairs) {
  const list = el("dl", { className: "facts" });
  for (const [name, value] of pairs) {
    if (value === undefined || value === null || value === "") continue;
    list.append(el("div", {}, el("dt", {}, name), el("dd", {}, value)));
  }
  return list;
}

export function link(href, text) {
  return el("a", { href, className: "id" }, text);
}

/** A router's name and address, as a link to its console if this browser can probably reach it. */
export function consoleOf({ routerId, address }, replicas) {
  const text = `${routerId} (${address})`;
  const url = replicas.find((replica) => replica.routerId === routerId)?.consoleUrl ?? "";
  const local = (host) => /^(localhost|127\..*|\[::1\])$/.test(host);
  const reachable = /^https?:\/\//.test(url) && (!local(new URL(url).hostname) || local(location.hostname));
  return reachable ? link(url, text) : text;
}

/** A policy with its settings, in one line. */
export function policyText({ name, settings = {} }) {
  return [name, ...Object.keys(settings).sort().map((key) => `${key}=${settings[key]}`)].join(" ");
}

export function pill(text, tone) {
  return el("span", { className: "pill", "data-tone": tone }, text);
}

/** Announce the result of an action to screen readers. */
export function say(text) {
  document.getElementById("said").textContent = text;
}

/** Show a modal form with the nodes `body`. If `act` throws, the form stays open and shows the error. */
export function ask(title, body, action, act) {
  const before = document.activeElement;
  const reason = el("p", { className: "bad", role: "alert" });
  const form = el("form", {
    onsubmit: async (event) => {
      event.preventDefault();
      try {
        await act();
        dialog.close();
      } catch (error) {
        setText(reason, error.message);
      }
    },
  });
  const cancel = el("button", { type: "button", className: "quiet", onclick: () => dialog.close() }, "Cancel");
  form.append(el("h2", { id: "asked" }, title), ...body.filter(Boolean), reason, el("div", { className: "buttons" }, cancel, el("button", { type: "submit" }, action)));
  const dialog = el("dialog", { "aria-labelledby": "asked", onclose: () => { dialog.remove(); before?.focus?.(); } }, form);
  document.body.append(dialog);
  dialog.showModal();
}

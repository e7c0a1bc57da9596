// FleetService as JSON over HTTP. The token stays in this module and, if asked, in the tab's session storage; it travels as a header.

const KEPT = "pointsman.token";
let token = sessionStorage.getItem(KEPT) ?? "";

export class CallError extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export function signIn(given, keep) {
  token = given;
  if (keep) sessionStorage.setItem(KEPT, given);
}

export function signOut() {
  token = "";
  sessionStorage.removeItem(KEPT);
}

function headers(more) {
  return token ? { ...more, Authorization: `Bearer ${token}` } : { ...more };
}

async function failure(response) {
  const { code = "HTTP", message = response.statusText } = await response.json().catch(() => ({}));
  return new CallError(response.status, code, message);
}

/** {role, open, read, operate} of whoever holds the token. */
export async function role() {
  const response = await fetch("/api/role", { headers: headers() });
  if (!response.ok) throw await failure(response);
  return response.json();
}

/** One unary method of FleetService. Throws CallError, or TypeError when nothing answers. */
export async function call(method, request = {}) {
  const response = await fetch(`/api/${method}`, {
    method: "POST",
    headers: headers({ "Content-Type": "application/json" }),
    body: JSON.stringify(request),
    signal: AbortSignal.timeout(15000),
  });
  if (!response.ok) throw await failure(response);
  return response.json();
}

/** Server-sent events of the decisions, until they end or `signal` aborts: EventSource could not send the token's header. */
export async function watch(signal, opened, told) {
  const response = await fetch("/api/decisions", { headers: headers(), signal });
  if (!response.ok) throw await failure(response);
  opened();
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (text + value).split("\n\n");
    text = events.pop();
    for (const event of events) {
      if (event.startsWith("data: ")) told(JSON.parse(event.slice("data: ".length)));
    }
  }
}

// FleetService as JSON over HTTP. The token is kept in this module and, if the user wants, in the tab's session storage. It is sent as
// a header.

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

/** The result of `asking`. Any error other than a CallError, such as a network failure, becomes a CallError with status 0. */
async function reach(asking) {
  try {
    return await asking();
  } catch (error) {
    throw error instanceof CallError ? error : new CallError(0, "UNREACHABLE", "The router does not answer.");
  }
}

async function answered(response) {
  if (response.ok) return response;
  const { code = "HTTP", message = response.statusText } = await response.json().catch(() => ({}));
  throw new CallError(response.status, code, message);
}

/** {role, open, read, operate}: the role of the current token and what it permits. Throws CallError. */
export function role() {
  return reach(async () => (await answered(await fetch("/api/role", { headers: headers() }))).json());
}

/** Call a unary method of FleetService. Throws CallError. */
export function call(method, request = {}) {
  const asked = {
    method: "POST",
    headers: headers({ "Content-Type": "application/json" }),
    body: JSON.stringify(request),
    signal: AbortSignal.timeout(15000),
  };
  return reach(async () => (await answered(await fetch(`/api/${method}`, asked))).json());
}

/** Receive decisions as server-sent events until the stream ends or `signal` aborts. EventSource cannot send the token's header. */
export async function watch(signal, opened, received) {
  const response = await reach(async () => answered(await fetch("/api/decisions", { headers: headers(), signal })));
  opened();
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reach(() => reader.read());
    if (done) return;
    const events = (text + value).split("\n\n");
    text = events.pop();
    for (const event of events) {
      if (event.startsWith("data: ")) received(JSON.parse(event.slice("data: ".length)));
    }
  }
}

// Converts and formats values of protobuf's JSON: absent numbers are 0, 64-bit integers are strings, durations are like "1.5s".

const grouped = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const NONE = "–";

export const num = (value) => Number(value ?? 0);
/** A figure of an engine's report; undefined if the engine does not report it. */
export const reported = (report, name) => ((report?.unknown ?? []).includes(name.replace(/[A-Z]/g, (letter) => `_${letter.toLowerCase()}`)) ? undefined : num(report?.[name]));
export const countReported = (report, name) => (reported(report, name) === undefined ? NONE : count(reported(report, name)));
export const seconds = (duration) => (duration === undefined ? undefined : parseFloat(duration));
export const count = (value) => grouped.format(num(value));
export const bare = (name, prefix) => (name ?? "").replace(prefix, "");
/** The enum values of a decision, or of a group of decisions, without prefix: LIGHT, OFFLOAD, OK. */
export const classOf = (decision) => bare(decision.routeClass, "ROUTE_CLASS_");
export const modeOf = (decision) => bare(decision.mode, "PLACEMENT_MODE_");
export const outcomeOf = (decision) => bare(decision.outcome, "DECISION_OUTCOME_");

/** A share, 0 to 1, in per cent; "–" if unknown. */
export function percent(share, digits = 0) {
  return share === undefined || Number.isNaN(share) ? NONE : (share * 100).toFixed(digits);
}

/** A time span in a unit in which it has two or three digits. */
export function span(s) {
  if (s === undefined || Number.isNaN(s)) return NONE;
  if (s < 0.0001) return s === 0 ? "0 s" : `${(s * 1e6).toFixed(0)} µs`;
  if (s < 0.001) return `${(s * 1e6).toFixed(0)} µs`;
  if (s < 0.01) return `${(s * 1e3).toFixed(1)} ms`;
  if (s < 1) return `${(s * 1e3).toFixed(0)} ms`;
  if (s < 10) return `${s.toFixed(1)} s`;
  if (s < 120) return `${s.toFixed(0)} s`;
  if (s < 7200) return `${(s / 60).toFixed(0)} min`;
  if (s < 172800) return `${(s / 3600).toFixed(0)} h`;
  return `${(s / 86400).toFixed(0)} d`;
}

/** An age, in tenths of a second at the finest, so that the values of a column can be compared. */
export const age = (s) => (s >= 0 && s < 10 ? `${s.toFixed(1)} s` : span(s));

/** A figure of a policy, with at most six significant digits. */
export function figure(value) {
  if (value === undefined || value === null) return NONE;
  if (typeof value !== "number") return String(value);
  const rounded = Number(value.toPrecision(Math.abs(value) >= 1 ? 6 : 4));
  return Number.isInteger(value) || Math.abs(rounded) >= 100000 ? grouped.format(value) : String(rounded);
}

export function signed(value) {
  const n = num(value);
  return n > 0 ? `+${grouped.format(n)}` : grouped.format(n).replace("-", "−");
}

const clockFormat = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit", fractionalSecondDigits: 3 });
export const clock = (timestamp) => (timestamp ? clockFormat.format(new Date(timestamp)) : NONE);
export const moment = (timestamp) => (timestamp ? `${new Date(timestamp).toLocaleDateString("en-CA")} ${clock(timestamp)}` : NONE);
export const orNone = (text) => (text === undefined || text === "" ? NONE : text);

// The meanings of reasons and route classes, as the router returns them.

let listed = {};

/** Load the meanings from the router, once. Throws CallError. */
export async function learnWords(app) {
  if (!listed.policies) listed = await app.call("ListPolicies");
}

/** "kept on its session's instance"; "" for a reason without a meaning. */
export const meaningOf = (reason) => listed.reasons?.[reason] ?? "";
/** "session_affinity: kept on its session's instance". */
export const reasonText = (reason) => [reason, meaningOf(reason)].filter(Boolean).join(": ");
/** "light: under 5,000 new tokens, or over 50% of the prompt cached"; `name` is LIGHT. */
export const classText = (name) => [name.toLowerCase(), listed.routeClasses?.[name]].filter(Boolean).join(": ");

// The stream of decisions: keeps the newest few hundred, whichever view is shown.

import { CallError, watch } from "./api.js";
import { num } from "./format.js";

// Maximum number of decisions that are kept.
export const KEPT = 500;
// Time over which the rate of decisions is measured, s.
const RATE_S = 10;

/**
 * The newest decision of each request, of decisions with the newest first. A prompt that is sent in slices has a decision for each;
 * the row has their number, `parts`, and the time, wait and prediction of the first.
 */
export function onePerRequest(decisions) {
  const rows = new Map();
  for (const decision of decisions) {
    const { time, held, cachedTokens, kvLoad } = decision;
    const row = rows.get(decision.requestId);
    rows.set(decision.requestId, row ? { ...row, parts: row.parts + 1, time, held, cachedTokens, kvLoad } : { ...decision, parts: 1 });
  }
  return [...rows.values()];
}

export class Feed {
  constructor(app) {
    this.app = app;
    this.decisions = new Map();
    this.listeners = new Set();
    this.counts = [];
    this.state = "off";
  }

  start() {
    if (this.stopper) return;
    this.stopper = new AbortController();
    this.#run(this.stopper.signal);
  }

  stop() {
    this.stopper?.abort();
    this.stopper = undefined;
    this.decisions.clear();
    this.counts = [];
    this.state = "off";
  }

  /** The decisions, newest first. */
  get newest() {
    return [...this.decisions.values()].reverse();
  }

  /** Decisions per second over the last RATE_S. */
  get rate() {
    const since = Date.now() - RATE_S * 1000;
    this.counts = this.counts.filter(([at]) => at >= since);
    return this.counts.reduce((sum, [, made]) => sum + made, 0) / RATE_S;
  }

  async #run(signal) {
    for (let pause = 500; !signal.aborted; pause = Math.min(pause * 2, 10000)) {
      try {
        await watch(signal, () => {
          pause = 500;
          this.#set("live");
          // What came over an earlier connection may have changed since, and newer decisions may be missing after it.
          this.decisions = new Map();
          this.#catchUp();
        }, (news) => this.#received(news));
      } catch (error) {
        if (signal.aborted) return;
        if (!(error instanceof CallError)) reportError(error);
        this.#set(error.status === 429 ? "full" : "lost");
      }
      await new Promise((resolve) => setTimeout(resolve, pause));
    }
  }

  #set(state) {
    this.state = state;
    this.#tell();
  }

  async #catchUp() {
    try {
      const { decisions = [] } = await this.app.call("ListDecisions", { pageSize: 200 });
      const newer = this.newest.reverse();
      this.decisions = new Map([...decisions.reverse(), ...newer].map((decision) => [decision.decisionId, decision]));
      this.#tell();
    } catch (error) {
      // The list is requested again with the next connection.
      if (!(error instanceof CallError)) reportError(error);
    }
  }

  #received({ decisions = [], skipped = 0 }) {
    let made = num(skipped);
    for (const decision of decisions) {
      made += this.decisions.has(decision.decisionId) ? 0 : 1;
      this.decisions.set(decision.decisionId, decision);
    }
    this.counts.push([Date.now(), made]);
    for (const id of this.decisions.keys()) {
      if (this.decisions.size <= KEPT) break;
      this.decisions.delete(id);
    }
    this.#tell();
  }

  #tell() {
    for (const listener of this.listeners) listener();
  }
}

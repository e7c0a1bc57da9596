"""`elastic`: as `unified`, but a HEAVY request prefills on another instance if that saves time. Pure."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from msgspec.structs import replace

from pointsman_router.core.placement_types import HEAVY_NEW_TOKENS, Candidate, FleetView, PlacementRequest, PolicyResult
from pointsman_router.core.policy.base import choice, least, mean, offload, setting
from pointsman_router.core.policy.unified import Unified

PREFILL_IDLE_DECODE_BUSY = "prefill_idle_decode_busy"
PREFILL_OVERLOADED = "prefill_overloaded"
DECODE_IDLE = "decode_idle"
BELOW_THRESHOLD = "below_threshold"
TRANSFER_DOMINATES = "transfer_dominates"
NO_OTHER_INSTANCE = "no_other_instance"


@dataclass(frozen=True)
class Elastic(Unified):
    """As `unified`, except that each HEAVY request is offloaded if the decider says so.

    Terms:
        D = best cache hit under the ceiling; ties by `unified`'s choice, then ongoing_tokens, in turn
        P = argmin ongoing_tokens (input tokens of open requests) of those under the ceiling that can send KV to D; ties by new
            tokens, num_requests, in turn
        HEAVY: at least heavy_new_tokens are new on D
    An offload is PREFILL on P, then SERVE on D.
    Decider `cost`, in s: offload iff gain > queue + transfer
        gain = 0.5 * D.new / throughput * [D is decoding]; throughput in tokens/s
        queue = P.ongoing_tokens / throughput
        transfer = transfer_base_s + transfer_token_s * D.new
    Decider `heuristic`, in tokens: offload iff D is decoding, P.ongoing_tokens < D.ongoing_tokens, and
        P.ongoing_tokens <= prefill_overload_factor * mean(ongoing_tokens)
    Neither decider uses the tokens that are new on P; the decision's figures include them. It sees all of a large pool, since P
    is the one with the fewest input tokens, or only prefills; a part of the pool is chosen by neither.

    Reasons: `prefill_idle_decode_busy` (offloaded), `decode_idle` (no decode on D that a prefill would slow down),
    `transfer_dominates` (no gain even if P were idle), `prefill_overloaded`, `below_threshold` (not HEAVY), `no_other_instance`.
    Reason of the step: `offload`, or one of `unified`'s.
    Source: the reference system's elastic. transfer_token_s is from its post-hoc transfer of 32k tokens in 0.53 s, throughput
    from its prefill of 32k tokens in 4.4 s.
    """

    name: ClassVar[str] = "elastic"  # as registered, and as decisions record it
    uses_shortlist: ClassVar[bool] = False  # P may be an instance that a shortlist leaves out

    # cost compares seconds, heuristic tokens
    decider: str = choice("cost", ("cost", "heuristic"), "what decides on an offload")
    # tokens; below it the reason is below_threshold
    heavy_new_tokens: float = setting(HEAVY_NEW_TOKENS, 1.0, 1e9, "new tokens from which a request is HEAVY")
    # tokens/s, of all instances alike; not the learned curve
    throughput: float = setting(7_000.0, 1.0, 1e9, "prefilled tokens per second (cost)")
    # added to each transfer, however long
    transfer_base_s: float = setting(0.0, 0.0, 60.0, "fixed seconds per KV transfer (cost)")
    # s per token that is new on D
    transfer_token_s: float = setting(1.6e-5, 0.0, 1.0, "seconds of a KV transfer per token (cost)")
    # on P's ongoing_tokens; the mean is over all instances that are not excluded
    prefill_overload_factor: float = setting(
        1.5, 0.0, 1e6, "maximum load of P, as a multiple of the mean load (heuristic)"
    )

    def choose(self, request: PlacementRequest, view: FleetView, rng: random.Random) -> PolicyResult:
        colocated = super().choose(request, view, rng)
        available = view.available()
        below = self.below_ceiling(view.eligible(), view.unseen)
        chosen = colocated.steps[0].instance_id
        decode = least(
            below,
            view.decision_number,
            lambda candidate: (-candidate.cached_tokens, candidate.instance_id != chosen, candidate.ongoing_tokens),
        )
        if decode.new_tokens < self.heavy_new_tokens:
            return replace(colocated, reason=BELOW_THRESHOLD)
        others = tuple(
            candidate for candidate in self.below_ceiling(available, view.unseen) if candidate.can_give_kv_to(decode)
        )
        if not others:
            return replace(colocated, reason=NO_OTHER_INSTANCE)
        prefill = least(
            others,
            view.decision_number,
            lambda candidate: (candidate.ongoing_tokens, candidate.new_tokens, candidate.num_requests),
        )
        if self.decider == "cost":
            reason, figures = self._cost(prefill, decode)
        else:
            reason, figures = self._heuristic(
                prefill, decode, mean(candidate.ongoing_tokens for candidate in available)
            )
        figures = {**figures, "decode_new_tokens": decode.new_tokens, "prefill_new_tokens": prefill.new_tokens}
        if reason != PREFILL_IDLE_DECODE_BUSY:
            return replace(colocated, reason=reason, figures=figures)
        return offload(request, prefill, decode, "offload", reason, scores=colocated.scores, figures=figures)

    def _cost(self, prefill: Candidate, decode: Candidate) -> tuple[str, Mapping[str, float]]:
        busy = decode.ongoing_decode_tokens > 0
        gain = 0.5 * decode.new_tokens / self.throughput * busy
        queue = prefill.ongoing_tokens / self.throughput
        transfer = self.transfer_base_s + self.transfer_token_s * decode.new_tokens
        figures = {"gain_s": gain, "queue_s": queue, "transfer_s": transfer}
        if gain > queue + transfer:
            return PREFILL_IDLE_DECODE_BUSY, figures
        if not busy:
            return DECODE_IDLE, figures
        return TRANSFER_DOMINATES if gain <= transfer else PREFILL_OVERLOADED, figures

    def _heuristic(self, prefill: Candidate, decode: Candidate, average: float) -> tuple[str, Mapping[str, float]]:
        figures = {
            "prefill_ongoing_tokens": prefill.ongoing_tokens,
            "decode_ongoing_tokens": decode.ongoing_tokens,
            "mean_ongoing_tokens": average,
        }
        if decode.ongoing_decode_tokens == 0:
            # There is no offload then. That D has no decode to disturb is the reason that holds for any load of P.
            return DECODE_IDLE, figures
        if (
            prefill.ongoing_tokens >= decode.ongoing_tokens
            or prefill.ongoing_tokens > self.prefill_overload_factor * average
        ):
            return PREFILL_OVERLOADED, figures
        return PREFILL_IDLE_DECODE_BUSY, figures

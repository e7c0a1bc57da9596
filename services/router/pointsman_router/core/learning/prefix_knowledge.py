"""Derives from reports and answers how much of a prompt each instance has cached, and its prefill progress. Pure.

Combines the exact index of reported keys, the provisional blocks that were just computed, the approximate index, and the
prediction audit that checks answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

from pointsman_common.core.block_keys import KEY_TOKENS
from pointsman_common.core.key_report_types import Delta, KeyMessage, SnapshotEnd, Tier
from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.instances.instance_registry import InstanceRecord, InstanceRegistry
from pointsman_router.core.instances.prediction_audit import AGAIN_S, SLACK_BLOCKS, SLACK_SHARE
from pointsman_router.core.learning.prefill_cost_observer import PrefillObserver
from pointsman_router.core.learning.prefill_progress import NO_KEYS, OpenPrompt, PrefillProgress
from pointsman_router.core.load.reservations import Reservation
from pointsman_router.core.placement_types import Candidate, Decision, Load, PrefixSource, StepKind
from pointsman_router.core.prefix.computed_prompts import ComputedPrompts
from pointsman_router.core.prefix.exact_index import PrefixIndex
from pointsman_router.core.prefix.lower_tiers import LowerBlocks, LowerTiers
from pointsman_router.core.prefix.provisional_blocks import ProvisionalBlocks
from pointsman_router.core.turn import Turn


class PrefixMatches(NamedTuple):
    """Number of leading blocks of a prompt by instance (absent: none), how many of them are provisional, and how many blocks
    after them are in lower tiers."""

    blocks: Mapping[str, int]
    provisional: Mapping[str, int]
    lower: Mapping[str, LowerBlocks] = MappingProxyType({})


_NOTHING = PrefixMatches({}, {})
# Maximum number of block keys assumed on an instance without KV events whose KV capacity is unknown.
ASSUMED_CAPACITY_KEYS = 16_384
# An agent is silent if it sent no message for SILENT_INTERVALS of its report intervals, and for LEAST_SILENCE_S seconds.
SILENT_INTERVALS, LEAST_SILENCE_S = 2, 2.0


@dataclass(slots=True)
class PrefixKnowledge:
    """Combines all sources of prefix knowledge."""

    index: PrefixIndex  # keys on the GPU, as instances' events report them
    instances: InstanceRegistry  # the records have each instance's copy, trust and audits
    stale_keys_s: float  # time since the last message of an instance's agent after which its cache counts as empty, s
    prefill_observer: PrefillObserver  # told of prefills that progress by events
    turn: Turn  # told that the fleet has changed, when the copy of an instance's keys is dropped
    prefill_progress: PrefillProgress = field(default_factory=PrefillProgress)  # open prompts, by the events
    provisional: ProvisionalBlocks = field(default_factory=ProvisionalBlocks)  # keys that events are yet to report
    # They count for instances without trusted KV events.
    computed_prompts: ComputedPrompts = field(default_factory=ComputedPrompts)
    lower_tiers: LowerTiers = field(default_factory=LowerTiers)  # keys below the GPU, as agents report them
    # Instance -> when its lower tiers count again, s: its answers had fewer tokens cached than its GPU and these should have.
    _unloaded: dict[str, float] = field(default_factory=dict)
    # Instances with exact keys of which the last answers leave a doubt.
    _doubted: set[str] = field(default_factory=set)

    # ---- what is known ----

    def source(self, record: InstanceRecord, now: float) -> PrefixSource:
        """Return the source of the instance's cached blocks at `now`; NONE if its cache counts as empty."""
        if record.lost_at is not None:
            return PrefixSource.APPROXIMATE
        if now > record.heard_at + self.stale_keys_s:
            return PrefixSource.NONE
        if record.exact:
            return PrefixSource.EVENTS if record.sync.live else PrefixSource.NONE
        return PrefixSource.NONE if now < record.placement_audit.suspended_until else PrefixSource.APPROXIMATE

    def source_changes_at(self, record: InstanceRecord) -> tuple[float, float]:
        """Return the times at which the source may change without an event."""
        return record.heard_at + self.stale_keys_s, record.placement_audit.suspended_until

    def indexes(self) -> tuple[PrefixIndex, ...]:
        """Return the indexes in which instances' keys are looked up."""
        assumed = self.computed_prompts.index
        lower = self.lower_tiers.indexes() if self.lower_tiers else ()
        return (self.index, assumed, *lower) if len(assumed) else (self.index, *lower)

    def match(
        self,
        keys: Sequence[int],
        candidates: Sequence[Candidate],
        known: Mapping[PrefixIndex, Mapping[str, int]] = MappingProxyType({}),
        session: str = "",
    ) -> PrefixMatches:
        """Return how many leading blocks of the prompt each candidate has, by its prefix_source. `known`: those that some are
        known to have by an index. Changes nothing but cached data.

        An approximate candidate has what it was sent or, if its events are credible though not trusted, what these told:
        whichever is more. So has one with exact keys that are doubted."""
        if not keys:
            return _NOTHING
        events = PrefixSource.EVENTS
        exact = [candidate.instance_id for candidate in candidates if candidate.prefix_source is events]
        placed, learned = self.computed_prompts.index, dict[str, int]()
        if len(exact) < len(candidates):
            assumed = [
                candidate.instance_id for candidate in candidates if candidate.prefix_source is PrefixSource.APPROXIMATE
            ]
            learned = placed.leading_blocks(keys, assumed, known.get(placed, {}), session)
            exact += [instance_id for instance_id in assumed if self._is_credible(instance_id)]
        if self._doubted:
            learned |= placed.leading_blocks(keys, self._doubted.intersection(exact))
        blocks = self.index.leading_blocks(keys, exact, known.get(self.index, {}), session)
        further = self.provisional.reach(keys, blocks)
        provisional = {instance_id: reach - blocks[instance_id] for instance_id, reach in further.items()}
        blocks |= further
        followed = {}
        for instance_id, count in learned.items():
            if instance_id in blocks:
                blocks[instance_id] = max(blocks[instance_id], count)
            else:
                followed[instance_id] = count
        lower = self._lower_blocks(keys, blocks) if self.lower_tiers else _NOTHING.lower
        return PrefixMatches(blocks | followed if followed else blocks, provisional, lower)

    def _is_credible(self, instance_id: str) -> bool:
        record = self.instances.get(instance_id)
        if record is None or not record.follows_events or not record.trust.credible:
            return False
        # The keys of an instance whose agent is gone are followed no longer, and most of them are still right.
        return record.sync.live or record.lost_at is not None

    def _lower_blocks(self, keys: Sequence[int], blocks: Mapping[str, int]) -> Mapping[str, LowerBlocks]:
        """Return the blocks that follow in lower tiers, of instances whose answers agree with what they report of these."""
        if self._unloaded:
            blocks = {name: count for name, count in blocks.items() if name not in self._unloaded}
        return self.lower_tiers.continued(keys, blocks)

    def trusts_lower_tiers(self, instance_id: str) -> bool:
        """Return whether an instance's answers agree with what it reports of its lower tiers."""
        return instance_id not in self._unloaded

    # ---- agents ----

    def heard(self, record: InstanceRecord, now: float) -> list[ev.Effect]:
        """Handle a message of the instance's agent; call before `heard_at` is set. The answers observed since its previous
        message are judged now, unless it was silent. Return the effects of the prediction audit. Mutates."""
        self.silence_ends(record, now)
        if not record.sync.live or not record.prediction_audit.judge():
            return []
        return self._reject_events(record)

    def counted(self, record: InstanceRecord, load: Load, now: float) -> list[ev.Effect]:
        """Compare the predictions for answers without usage details with the engine's counters. Return the effects of the
        prediction audit. Mutates."""
        queries, hits = load.prefix_cache_queries, load.prefix_cache_hits
        if not record.follows_events or queries is None or hits is None:
            return []
        found = record.counted_hits.counted(queries, hits, load.sampled_at)
        if found is None or not record.sync.live:
            return []
        answers, predicted, reported = found
        for _ in range(answers):
            self._observe_events(record, predicted, reported)
        return self._reject_events(record) if record.prediction_audit.judge() else []

    def compare(self, record: InstanceRecord, now: float) -> list[ev.Effect]:
        """Compare the answers of an instance with the keys in its events; call after a message of its agent was applied. Return
        the effects of a change of trust. Mutates."""
        trust, instance_id = record.trust, record.info.instance_id
        if not trust.waits:
            return []
        if not record.sync.live:
            if not record.follows_events:
                trust.forget_waiting()
            return []
        before, had_placements = trust.proven, record.needs_placements
        changed = trust.compare(partial(self.index.holds, instance_id), now, sparse=record.info.sparse_prefixes)
        self.keep_placements(record, had_placements)
        if not changed:
            return []
        if before is not trust.proven:
            record.forget_snapshot()
            self.provisional.drop(instance_id)
        if trust.proven:
            return [ev.EventsTrusted(instance_id, again=bool(trust.losses))]
        return [ev.EventsDistrusted(instance_id, record.prefix_reason)]

    def keep_placements(self, record: InstanceRecord, before: bool) -> None:
        """Let the approximate keys of an instance begin or cease to count. `before`: whether they counted."""
        instance_id = record.info.instance_id
        if record.exact and record.trust.doubted:
            self._doubted.add(instance_id)
        else:
            self._doubted.discard(instance_id)
        if record.needs_placements is before:
            return
        self.computed_prompts.set_counts(instance_id, record.needs_placements)

    def silence_ends(self, record: InstanceRecord, now: float) -> None:
        """Exclude requests placed before `now` from the audit if the instance's agent was silent or lost. Evictions meanwhile
        were not reported, so answers to these requests are no evidence against the index. Mutates."""
        silence_s = max(SILENT_INTERVALS * record.report_interval_s, LEAST_SILENCE_S)
        if record.follows_events and (now - record.heard_at > silence_s or record.lost_at is not None):
            record.prediction_audit.ignore_before(now)
            record.trust.forget_waiting()

    def keys_reported(self, record: InstanceRecord, message: KeyMessage, now: float) -> list[OpenPrompt]:
        """Apply `message`, which the instance's copy has applied; return the prompts whose prefill has progressed. Mutates."""
        instance_id = record.info.instance_id
        if not record.sync.live:
            self.provisional.drop(instance_id)
            return []
        match message:
            case Delta():
                if message.cleared:
                    self.provisional.drop(instance_id)
                    self.prefill_progress.removed(instance_id, self.index)
                if message.tier != Tier.DEVICE:
                    return []
                self.provisional.settle(instance_id, message.removed)
                self.provisional.settle(instance_id, message.added)
                if message.removed:
                    self.prefill_progress.removed(instance_id, self.index, frozenset(message.removed))
                moved = self.prefill_progress.reported(instance_id, self.index)
            case SnapshotEnd():
                record.prediction_audit.reset(now)
                record.trust.forget_waiting()
                moved = self.prefill_progress.reported(instance_id, self.index)
            case _:
                return []
        if moved:
            self.prefill_observer.moved(instance_id, _complete(moved, record.info.block_size), now)
        return moved

    def forget(self, instance_id: str) -> None:
        """Drop all knowledge of an instance that is gone, or has a new incarnation. Mutates."""
        self.provisional.drop(instance_id)
        self.computed_prompts.drop(instance_id)
        self.prefill_observer.forget(instance_id)
        self.prefill_progress.unwatch_all(instance_id)
        self._unloaded.pop(instance_id, None)
        self._doubted.discard(instance_id)

    # ---- requests ----

    def opened(self, reservation: Reservation, keys: Sequence[int], target_tokens: int, now: float) -> OpenPrompt:
        """Return the prompt of a step that was reserved, and watch its prefill if the instance's events report it.
        `target_tokens`: tokens of the prompt that are on the instance after the step. Mutates."""
        prompt = OpenPrompt(
            request_id=reservation.request_id,
            instance_id=reservation.instance_id,
            opened_at=now,
            keys=keys,
            cached_tokens=target_tokens - reservation.new_tokens,
            device_tokens=max(target_tokens - reservation.new_tokens - reservation.kv_load.credit_tokens, 0),
            target_tokens=target_tokens,
        )
        record = self.instances.get(reservation.instance_id)
        if record is None or not prompt.keys or not record.follows_events:
            return prompt
        if reservation.new_tokens:
            self.prefill_progress.watch(prompt, self.index)
        if record.needs_placements:
            self._look_up(prompt, record)
        return prompt

    def _look_up(self, prompt: OpenPrompt, record: InstanceRecord) -> None:
        """Note how many tokens of a prompt its instance has by its events and by the router's placements."""
        block = record.info.block_size
        reusable = max(prompt.target_tokens - 1, 0)
        keys = prompt.keys[: reusable // KEY_TOKENS]

        def tokens(index: PrefixIndex) -> int:
            found = index.leading_blocks(keys, (prompt.instance_id,))[prompt.instance_id] * KEY_TOKENS
            return max(found - found % block - record.info.uncertain_blocks * block, 0)

        prompt.by_events, prompt.by_placements = tokens(self.index), tokens(self.computed_prompts.index)

    def first_token(self, prompt: OpenPrompt, now: float) -> None:
        """Record that a prompt is computed in full, and its answer has begun. Mutates."""
        self.prefill_progress.computed(prompt)
        self._learn(prompt, now)
        if prompt.learned:
            record = self.instances.get(prompt.instance_id)
            if record is None or not record.needs_placements:
                # No step follows, and events report what stays cached. The keys of 130k tokens take 65 kB.
                prompt.keys = NO_KEYS

    def step_done(self, prompt: OpenPrompt, now: float) -> None:
        """Record that a PREFILL step is done. Mutates."""
        self.prefill_progress.computed(prompt)
        self._learn(prompt, now, goes_on=True)

    def finished(
        self, prompt: OpenPrompt, finished: ev.Finished, decision: Decision | None, now: float
    ) -> list[ev.Effect]:
        """Learn from the answer of a request that has ended; return the effects of the prediction audit. Mutates."""
        if finished.outcome == "OK":
            self._learn(prompt, now)
        return self._judge(prompt, finished.cached_tokens, decision, now)

    def closed(self, prompt: OpenPrompt) -> None:
        """Stop watching a prompt whose request is no longer open on the instance. Mutates."""
        self.prefill_progress.forget(prompt)

    def expire(self, now: float) -> None:
        """Remove expired provisional blocks, and let lower tiers count again. Mutates."""
        self.provisional.expire(now)
        if self._unloaded:
            self._unloaded = {name: until for name, until in self._unloaded.items() if until > now}

    def check_invariants(self, prompts: Mapping[str, OpenPrompt | None]) -> None:
        """Raise AssertionError if the open requests' prompts, the provisional or the approximate blocks are inconsistent."""
        for record in self.instances.records():
            assert record.follows_events or not record.sync.live, record.info.instance_id
        live = {record.info.instance_id for record in self.instances.records() if record.sync.live}
        self.prefill_progress.check_invariants(self.index, live, prompts)
        self.provisional.check_invariants()
        self.computed_prompts.check_invariants()
        for record in self.instances.records():
            assert record.needs_placements or not self.computed_prompts.count(record.info.instance_id)
        doubted = {
            record.info.instance_id for record in self.instances.records() if record.exact and record.trust.doubted
        }
        assert doubted == self._doubted
        self.lower_tiers.check_invariants()

    def _learn(self, prompt: OpenPrompt, now: float, *, goes_on: bool = False) -> None:
        """Learn that a prompt is computed. `goes_on`: its request goes on from its end. Mutates."""
        record = self.instances.get(prompt.instance_id)
        if prompt.learned or record is None or not prompt.keys:
            return
        per_block = record.info.block_size // KEY_TOKENS
        # An engine keeps only whole blocks of its own size.
        keys = prompt.keys[: min(prompt.target_tokens // KEY_TOKENS, len(prompt.keys)) // per_block * per_block]
        counts = record.needs_placements
        if record.follows_events:
            holds = partial(self.index.holds, prompt.instance_id)
            record.trust.computed(keys, record.info.block_size, holds, now, sparse=record.info.sparse_prefixes)
        capacity = _capacity_keys(record)
        prompt.learned = self.computed_prompts.learn(prompt.instance_id, keys, capacity, counts=counts)
        if self.source(record, now) is PrefixSource.EVENTS:
            if record.info.sparse_prefixes and not goes_on:
                # Blocks at the front of the prompt may be evicted before its end is computed, so only events show the hits of
                # other requests. The request that goes on has one at its end.
                return
            held = self.index.run_end(prompt.instance_id, keys, 0, len(keys))
            self.provisional.add(prompt.instance_id, keys[held:], now)

    def _judge(
        self, prompt: OpenPrompt, reported: int | None, decision: Decision | None, now: float
    ) -> list[ev.Effect]:
        """Compare the cached tokens predicted for the answering instance with those that its engine reported."""
        record = self.instances.get(prompt.instance_id)
        if decision is None or record is None or prompt.evicted or record.lost_at is not None:
            return []
        candidate = decision.view.find(prompt.instance_id)  # None: a gateway announced the request on another instance
        last = decision.result.steps[-1]
        if (
            candidate is None
            or candidate.incarnation != record.info.incarnation
            or last.kind is not StepKind.SERVE
            or last.instance_id != prompt.instance_id
            or prompt.opened_at < record.prediction_audit.since
        ):
            return []
        # Only the blocks on the GPU are evidence for the index of these.
        predicted = candidate.present_tokens - candidate.kv_load.tokens
        by_events, by_placements = prompt.by_events, prompt.by_placements
        if candidate.prefix_source is PrefixSource.EVENTS and by_events is None:
            by_events = predicted
        elif candidate.prefix_source is PrefixSource.APPROXIMATE and by_placements is None:
            by_placements = predicted
        if reported is None:
            if record.follows_events and by_events:
                record.counted_hits.answered(prompt.opened_at, by_events, now)
            return []
        if by_events is not None and record.sync.live:
            self._observe_events(record, by_events, reported)
        if candidate.kv_load.tokens:
            self._judge_load(record, candidate, reported, now)
        # The engine's events may still be on their way, so these are judged only after the agent's next message (`heard`). The
        # approximate index is the router's own and can be judged at once.
        if by_placements is None or not record.needs_placements or candidate.prefix_source is PrefixSource.NONE:
            return []
        if reported < by_placements:
            self.computed_prompts.correct(prompt.instance_id, prompt.keys, reported // KEY_TOKENS, prompt.learned)
        if record.follows_events:
            # What was placed while events misled decisions is soon evicted; each answer corrects its own part.
            return []
        record.placement_audit.observe(by_placements, reported, record.info.block_size)
        return self._reject_placements(record, now) if record.placement_audit.judge() else []

    def _observe_events(self, record: InstanceRecord, predicted: int, reported: int) -> None:
        """Compare an answer with the keys in the instance's events. If these were contradicted before, only as evidence for their
        return."""
        if not record.trust.credible:
            if predicted - reported > max(SLACK_BLOCKS * record.info.block_size, SLACK_SHARE * predicted):
                record.trust.short()
        elif record.prediction_audit.observe(predicted, reported, record.info.block_size):
            record.trust.short()

    def _judge_load(self, record: InstanceRecord, candidate: Candidate, reported: int, now: float) -> None:
        """Compare an answer with what lower tiers were predicted to add. After too many shortfalls they count as empty for a
        while: the blocks cannot be loaded, or are evicted before they are."""
        audit = record.load_audit
        audit.observe(candidate.present_tokens, reported, record.info.block_size)
        if audit.judge():
            self._unloaded[record.info.instance_id] = now + AGAIN_S

    def _reject_placements(self, record: InstanceRecord, now: float) -> list[ev.Effect]:
        """Let the approximate keys count as empty for a while."""
        record.forget_snapshot()
        self.computed_prompts.drop(record.info.instance_id)
        record.placement_audit.suspend(now)
        return [ev.PredictionAuditFailed(record.info.instance_id, record.placement_audit.reason)]

    def _reject_events(self, record: InstanceRecord) -> list[ev.Effect]:
        """Stop trusting events that told of blocks which the engine does not have, and request a new snapshot of the keys: only
        the router's or the agent's copy may be wrong."""
        instance_id, reason = record.info.instance_id, record.prediction_audit.reason
        had_placements = record.needs_placements
        new = record.trust.lose(reason)
        self.keep_placements(record, had_placements)
        self.provisional.drop(instance_id)
        record.forget_snapshot()
        record.sync.invalidate()
        self.turn.fleet_changed = True
        effects: list[ev.Effect] = [
            ev.PredictionAuditFailed(instance_id, reason),
            ev.Resync(record.stream_id, instance_id, f"prediction audit failed: {reason}"),
        ]
        return [*effects, ev.EventsDistrusted(instance_id, reason)] if new else effects


def _complete(prompts: Sequence[OpenPrompt], block_size: int) -> list[str]:
    """Return the requests of which all whole blocks are computed."""
    return [one.request_id for one in prompts if one.target_tokens - one.reached * KEY_TOKENS < block_size]


def _capacity_keys(record: InstanceRecord) -> int:
    """Return the maximum number of keys that an instance is assumed to hold."""
    return record.info.kv_capacity_tokens // KEY_TOKENS or ASSUMED_CAPACITY_KEYS

"""What the router makes of reports and answers: how much of a prompt each instance has, and how far it is with it. Pure.

It joins the index of reported keys, the credit for what was just computed, the approximate index and the trust that answers
earn or lose. Only RouterState calls it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from services.common.keys import KEY_TOKENS
from services.router import events as ev
from services.router.approximate import Approximate
from services.router.credit import Credit
from services.router.domain import Candidate, Decision, Phase, PrefixSource, StepKind
from services.router.fleet import Fleet, InstanceRecord
from services.router.prefills import Prefills
from services.router.prefix_index import PrefixIndex
from services.router.progress import NO_KEYS, OpenPrompt, Progress
from services.router.reservations import Reservation, Reservations
from services.router.sync import TIER_DEVICE, Delta, KeyMessage, SnapshotEnd


class Beliefs(NamedTuple):
    """How many leading blocks of a prompt instances have (absent: none), and how many of these rest on credit alone."""

    blocks: Mapping[str, int]
    credited: Mapping[str, int]


_NOTHING = Beliefs({}, {})


@dataclass(slots=True)
class Truth:
    """See the module. `stale_keys_s`: an instance not heard of for so long earns no credit. `approximate_keys`: the capacity
    assumed where an engine does not tell its own."""

    index: PrefixIndex
    fleet: Fleet
    stale_keys_s: float
    approximate_keys: int
    prefills: Prefills
    progress: Progress = field(default_factory=Progress)
    credit: Credit = field(default_factory=Credit)
    approximate: Approximate = field(default_factory=Approximate)

    # ---- what is believed ----

    def source(self, record: InstanceRecord, now: float) -> PrefixSource:
        """Where the instance's credit comes from now; NONE when it earns none."""
        if record.lost_at is not None or now > record.heard_at + self.stale_keys_s:
            return PrefixSource.NONE
        if record.sync.live:
            return PrefixSource.EVENTS
        if record.follows_events or now < record.trust.muted_until:
            return PrefixSource.NONE
        return PrefixSource.APPROXIMATE

    def source_changes_at(self, record: InstanceRecord) -> tuple[float, float]:
        """The moments at which the source may change by time alone."""
        return record.heard_at + self.stale_keys_s, record.trust.muted_until

    def beliefs(self, keys: Sequence[int], candidates: Sequence[Candidate]) -> Beliefs:
        """What each of `candidates` has, by its prefix_source, of the prompt with these keys. Changes nothing."""
        if not keys:
            return _NOTHING
        events = PrefixSource.EVENTS
        exact = [one.instance_id for one in candidates if one.prefix_source is events]
        blocks = self.index.leading_blocks(keys, exact)
        credited = {}
        for instance_id in self.credit.instances() if len(self.credit) else ():
            if (confirmed := blocks.get(instance_id)) is not None:
                reach = self.credit.reach(instance_id, keys, confirmed)
                if reach > confirmed:
                    blocks[instance_id], credited[instance_id] = reach, reach - confirmed
        if len(exact) < len(candidates):
            learned = [one.instance_id for one in candidates if one.prefix_source is PrefixSource.APPROXIMATE]
            blocks |= self.approximate.leading_blocks(keys, learned)
        return Beliefs(blocks, credited)

    # ---- agents ----

    def keys_reported(
        self, record: InstanceRecord, message: KeyMessage, reservations: Reservations, now: float
    ) -> None:
        """The instance's copy has taken `message` in. Mutates, `reservations` too."""
        instance_id = record.info.instance_id
        if not record.sync.live:
            self.credit.drop(instance_id)
            return
        match message:
            case Delta():
                if message.cleared:
                    self.credit.drop(instance_id)
                    self.progress.removed(instance_id, self.index)
                if message.tier != TIER_DEVICE:
                    return
                self.credit.settle(instance_id, message.removed)
                self.credit.settle(instance_id, message.added)
                if message.removed:
                    self.progress.removed(instance_id, self.index)
                moved = self.progress.reported(instance_id, self.index)
            case SnapshotEnd():
                record.trust.restore(now)
                moved = self.progress.reported(instance_id, self.index)
            case _:
                return
        for prompt in moved:
            reservations.prefilled(prompt.request_id, prompt.prefilled_tokens)
        if moved:
            self.prefills.moved(instance_id, now)

    def forget(self, instance_id: str) -> None:
        """The instance is gone, or is another one now. Mutates."""
        self.credit.drop(instance_id)
        self.approximate.drop(instance_id)
        self.prefills.forget(instance_id)
        for prompt in list(self.progress):
            if prompt.instance_id == instance_id:
                self.progress.unwatch(prompt.request_id)

    # ---- requests ----

    def opened(self, reservation: Reservation, keys: Sequence[int], target_tokens: int, now: float) -> None:
        """A step of a request was reserved; `target_tokens` of its prompt are to be on the instance when it is done. Mutates."""
        prompt = OpenPrompt(
            request_id=reservation.request_id,
            instance_id=reservation.instance_id,
            opened_at=now,
            keys=keys,
            cached_tokens=target_tokens - reservation.new_tokens,
            target_tokens=target_tokens,
        )
        self.progress.open(prompt)
        record = self.fleet.get(reservation.instance_id)
        if record is not None and record.follows_events and prompt.keys and reservation.new_tokens:
            self.progress.watch(prompt, self.index)

    def announced(self, reservation: Reservation, now: float) -> None:
        """A gateway told of an open request, known or not. Mutates."""
        known = self.progress.get(reservation.request_id)
        if known is None or known.instance_id != reservation.instance_id:
            self.progress.open(OpenPrompt(reservation.request_id, reservation.instance_id, now))
        elif reservation.phase is Phase.DECODE:
            self.first_token(reservation.request_id, now)

    def keys_of(self, request_id: str) -> Sequence[int]:
        """The keys of an open request's prompt; empty when unknown."""
        prompt = self.progress.get(request_id)
        return prompt.keys if prompt else NO_KEYS

    def opened_at(self, request_id: str) -> float:
        """When an open request's step was reserved."""
        prompt = self.progress.get(request_id)
        return prompt.opened_at if prompt else float("inf")

    def first_token(self, request_id: str, now: float) -> None:
        """A request's prompt has been computed in full. Mutates."""
        if prompt := self.progress.get(request_id):
            self.progress.unwatch(request_id)
            self._learn(prompt, now)

    def step_done(self, request_id: str, now: float) -> None:
        """A PREFILL step has computed its part. Mutates."""
        self.first_token(request_id, now)

    def finished(self, finished: ev.Finished, decision: Decision | None, now: float) -> list[ev.Effect]:
        """A request has ended: learn from its answer and forget it. Mutates."""
        prompt = self.progress.get(finished.request_id)
        if prompt is None:
            return []
        if finished.outcome == "OK":
            self._learn(prompt, now)
        effects = self._judge(prompt, finished.cached_tokens, decision, now)
        self.progress.close(finished.request_id)
        return effects

    def expire(self, now: float) -> None:
        """Time has passed. Mutates."""
        self.credit.expire(now)

    def check_invariants(self, reservations: Reservations) -> None:
        """Raise AssertionError when prompts, reservations, credit and beliefs contradict each other."""
        for record in self.fleet.records():
            assert record.follows_events or not record.sync.live, record.info.instance_id
        live = {record.info.instance_id for record in self.fleet.records() if record.sync.live}
        self.progress.check_invariants(self.index, live)
        self.credit.check_invariants()
        self.approximate.check_invariants()
        assert {prompt.request_id for prompt in self.progress} == {one.request_id for one in reservations}
        for prompt in self.progress:
            reservation = reservations.get(prompt.request_id)
            assert reservation is not None
            assert reservation.instance_id == prompt.instance_id

    def _learn(self, prompt: OpenPrompt, now: float) -> None:
        record = self.fleet.get(prompt.instance_id)
        if prompt.learned or record is None or not prompt.keys:
            return
        prompt.learned = True
        per_block = record.info.block_size // KEY_TOKENS
        # An engine keeps whole blocks of its own size only.
        keys = prompt.keys[: min(prompt.target_tokens // KEY_TOKENS, len(prompt.keys)) // per_block * per_block]
        if self.source(record, now) is PrefixSource.EVENTS:
            held = self.index.leading_blocks(keys, (prompt.instance_id,))[prompt.instance_id]
            self.credit.give(prompt.instance_id, keys[held:], now)
        elif not record.follows_events:
            capacity = record.info.kv_capacity_tokens // KEY_TOKENS or self.approximate_keys
            self.approximate.learn(prompt.instance_id, keys, capacity)

    def _judge(
        self, prompt: OpenPrompt, reported: int | None, decision: Decision | None, now: float
    ) -> list[ev.Effect]:
        """Compare what was predicted on the answering instance with what its engine reported."""
        record = self.fleet.get(prompt.instance_id)
        if reported is None or decision is None or record is None or prompt.evicted or record.lost_at is not None:
            return []
        candidate = decision.view.find(prompt.instance_id)  # None: a gateway announced it elsewhere
        last = decision.ruling.steps[-1]
        if (
            candidate is None
            or candidate.incarnation != record.info.incarnation
            or last.kind is not StepKind.SERVE
            or last.instance_id != prompt.instance_id
            or prompt.opened_at < record.trust.since
        ):
            return []
        predicted = candidate.cached_tokens
        if record.follows_events:
            if candidate.prefix_source is not PrefixSource.EVENTS or not record.sync.live:
                return []
        elif candidate.prefix_source is not PrefixSource.APPROXIMATE:
            return []
        elif reported < predicted:
            self.approximate.correct(prompt.instance_id, prompt.keys[reported // KEY_TOKENS :])
        followed = record.follows_events
        if not record.trust.report(predicted, reported, record.info.block_size, now):
            return []
        return self._distrust(record, followed, now)

    def _distrust(self, record: InstanceRecord, followed: bool, now: float) -> list[ev.Effect]:
        instance_id, reason = record.info.instance_id, record.trust.reason
        record.sight = None
        self.credit.drop(instance_id)
        self.approximate.drop(instance_id)
        if not followed:
            record.trust.mute(now)
            return [ev.Distrusted(instance_id, reason)]
        record.sync.distrust()
        effects: list[ev.Effect] = [ev.Distrusted(instance_id, reason), ev.FleetChanged()]
        if record.follows_events:
            effects.append(ev.Resync(record.stream_id, instance_id, f"distrusted: {reason}"))
        return effects

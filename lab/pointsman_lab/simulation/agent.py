"""The agent of one simulated instance: the agent's own key streams to routers, over the cache of an engine model. Pure.

Unlike the real agent it does not count blocks by vLLM's events (CachedBlocks). An engine model's blocks have the routers' keys
as hashes, and its events say which copy of a block is the first and which the last. A simulation with CachedBlocks took
some 30 % longer than one without streams; with streams alone it takes some 10 % longer. As in the real agent, a block in storage
is a key of the instance that has stored it.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from itertools import chain

from pointsman_agent.core.key_report_sequence import KeyStream
from pointsman_common.core.block_keys import digest_of
from pointsman_common.core.key_report_types import Delta, MergedDelta, Tier
from pointsman_lab.engine.block_cache import BlocksRemoved, BlocksStored
from pointsman_lab.engine.host_tier import HOST, STORAGE, OffloadedRemoved, OffloadedStored
from pointsman_lab.engine.interface import Event, Preempted
from pointsman_lab.engine.model import EngineModel
from pointsman_router.core import events_and_effects as ev

# Interval between load reports, s; the agent's default.
REPORT_INTERVAL_S = 1.0
# Interval between consistency checks, s; the agent's default.
CONSISTENCY_CHECK_INTERVAL_S = 5.0
# Number of changes that are kept. Every change is sent at once, so no stream needs an old one.
_KEPT_DELTAS = 8

_MEDIUM_OF = {Tier.HOST: HOST, Tier.STORAGE: STORAGE}

# (router, event, now): sends an event to that router.
ReportTo = Callable[[str, ev.Event, float], None]


class ModelKeys:
    """The keys of `model` and their newest changes, as an agent has them: a step's events take effect at the step's end."""

    def __init__(self, model: EngineModel, *, tiers_reported: bool) -> None:
        self.latest_seq = 0
        self._cache = model.cache
        # Keys in the tiers below, by tier.
        tiers = _MEDIUM_OF if tiers_reported and model.offloading is not None else ()
        self._offloaded: dict[Tier, set[int]] = {tier: set() for tier in tiers}
        self._deltas: deque[Delta] = deque(maxlen=_KEPT_DELTAS)
        # Events of the current step.
        self._unheard: Sequence[Event] = ()

    @property
    def oldest_seq(self) -> int:
        """Number of the first change that is still kept; latest_seq + 1 if there is none."""
        return self._deltas[0].seq if self._deltas else self.latest_seq + 1

    @property
    def key_count(self) -> int:
        """Number of keys."""
        came, went = _changes(self._unheard)
        offloaded = sum(map(len, self._offloaded.values()))
        return len(self._cache) - sum(map(len, came)) + sum(map(len, went)) + offloaded

    @property
    def digest(self) -> int:
        """Digest of all keys; computed at each access."""
        digest = digest_of(Tier.DEVICE, self.keys(Tier.DEVICE))
        for tier, keys in self._offloaded.items():
            digest ^= digest_of(tier, keys)
        return digest

    def keys(self, tier: Tier) -> Collection[int]:
        """Return the keys in `tier`."""
        if tier is not Tier.DEVICE:
            return self._offloaded.get(tier, ())
        keys = set(self._cache.cached_hashes())
        for event in reversed(self._unheard):
            if isinstance(event, BlocksStored):
                keys.difference_update(_new_hashes(event))
            elif isinstance(event, BlocksRemoved):
                keys.update(_evicted_hashes(event))
        return keys

    def delta(self, seq: int) -> Delta:
        """Return change number `seq`."""
        return self._deltas[seq - self.oldest_seq]

    def begin(self, events: Sequence[Event]) -> None:
        """Record the start of a step that ends with these events. Mutates."""
        self._unheard = events

    def apply(self, events: Sequence[Event]) -> bool:
        """Apply the events of a step that has ended; return whether any keys changed. Mutates."""
        self._unheard = ()
        changed = self._apply_to_device(events)
        for tier, keys in self._offloaded.items():
            added, removed = _offloaded_changes(events, _MEDIUM_OF[tier])
            # A block that was evicted from the host tier and computed again is stored in storage again.
            added = tuple([key for key in added if key not in keys])
            keys.difference_update(removed)
            keys.update(added)
            if added or removed:
                self._push(tier, added, removed)
                changed = True
        return changed

    def _apply_to_device(self, events: Sequence[Event]) -> bool:
        came, went = _changes(events)
        if not any(came) and not any(went):
            return False
        added, removed = _concatenated(came), _concatenated(went)
        if any(isinstance(event, Preempted) for event in events):
            # Blocks that a preempted request computed in this step may have been evicted in the same step.
            more, less = Counter(added), Counter(removed)
            added, removed = tuple((more - less).elements()), tuple((less - more).elements())
            if not added and not removed:
                return False
        self._push(Tier.DEVICE, added, removed)
        return True

    def _push(self, tier: Tier, added: tuple[int, ...], removed: tuple[int, ...]) -> None:
        self.latest_seq += 1
        self._deltas.append(Delta(self.latest_seq, tier, added, removed))


class SimulatedAgent:
    """Reports the keys of the instance `name` to all routers, over a stream to each that has welcomed `stream_id`. With `checks`
    it also sends consistency checks, so that a lost report is detected. With `tiers_reported` it also reports the keys of the
    tiers below the engine's own cache."""

    def __init__(
        self,
        name: str,
        stream_id: int,
        model: EngineModel,
        report_to: ReportTo,
        *,
        checks: bool,
        tiers_reported: bool = True,
    ) -> None:
        self.keys = ModelKeys(model, tiers_reported=tiers_reported)
        self._name = name
        self._stream_id = stream_id
        self._report_to = report_to
        self._check_interval_s = CONSISTENCY_CHECK_INTERVAL_S if checks else math.inf
        # By router.
        self._streams: dict[str, KeyStream] = {}

    def step_ended(self, events: Sequence[Event], now: float) -> None:
        """Apply a step's events and report the changes. Mutates."""
        if self.keys.apply(events):
            self.tell(now)

    def welcomed(self, router: str, welcome: ev.Welcome, now: float) -> None:
        """Start a new stream to a router, which has answered this agent's hello. Mutates."""
        stream = self._streams[router] = KeyStream(self.keys, self._check_interval_s)
        stream.welcome(welcome.resume_from_seq, now, snapshot=welcome.snapshot)
        self._tell(router, stream, now)

    def resync(self, router: str, now: float) -> None:
        """Send a router a snapshot of all keys, on its request. Mutates."""
        stream = self._streams[router]
        stream.begin_snapshot()
        self._tell(router, stream, now)

    def tell(self, now: float) -> None:
        """Send every router its next messages. Mutates."""
        for router, stream in self._streams.items():
            self._tell(router, stream, now)

    def _tell(self, router: str, stream: KeyStream, now: float) -> None:
        while (message := stream.next_message(now)) is not None:
            assert not isinstance(message, MergedDelta), "no router has set a pace"
            self._report_to(router, ev.KeysReported(self._stream_id, self._name, message), now)


def _changes(events: Sequence[Event]) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Return the keys that were added and those that were removed, as one tuple per event."""
    came = [_new_hashes(event) for event in events if isinstance(event, BlocksStored)]
    return came, [_evicted_hashes(event) for event in events if isinstance(event, BlocksRemoved)]


def _offloaded_changes(events: Sequence[Event], medium: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the keys that were added to a tier below and those that were removed, after all events in their order."""
    added: dict[int, None] = {}
    removed: dict[int, None] = {}
    for event in events:
        if isinstance(event, OffloadedStored | OffloadedRemoved) and event.medium == medium:
            came, gone = (added, removed) if isinstance(event, OffloadedStored) else (removed, added)
            for key in event.hashes:
                if key in gone:
                    del gone[key]
                else:
                    came[key] = None
    return tuple(added), tuple(removed)


def _new_hashes(stored: BlocksStored) -> tuple[int, ...]:
    """Return the hashes that were not cached before."""
    if not stored.already_cached:
        return stored.hashes
    return tuple(value for value in stored.hashes if value not in stored.already_cached)


def _evicted_hashes(removed: BlocksRemoved) -> tuple[int, ...]:
    """Return the hashes that are not cached any more."""
    if not removed.still_cached:
        return removed.hashes
    # If two blocks of one hash are evicted together, the second is the last one.
    return tuple((Counter(removed.hashes) - Counter(removed.still_cached)).elements())


def _concatenated(parts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return all parts as one tuple. Mostly there is only one part, of hundreds of keys, which is not copied."""
    return parts[0] if len(parts) == 1 else tuple(chain.from_iterable(parts))

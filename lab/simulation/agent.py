"""The agent of one simulated instance: the agent's own streams to routers, over what an engine model has cached. Pure.

Of the real one it lacks the counting of blocks by vLLM's events (CachedBlocks): an engine model's blocks have the routers' keys
as their hashes, and it knows which copy of a block is the first and which the last. A simulation that counted them again took
some 30 % longer than one without streams; with streams alone it takes some 10 % longer.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from itertools import chain

from pointsman.agent.core import cached_blocks, key_stream
from pointsman.agent.core.cached_blocks import Tier
from pointsman.agent.core.key_stream import KeyStream
from pointsman.common.core.block_keys import digest_of
from pointsman.lab.engine.block_cache import BlockCache, BlocksRemoved, BlocksStored
from pointsman.lab.engine.interface import Event, Preempted
from pointsman.router.core import events_and_effects as ev
from pointsman.router.core.instances import report_sync

# As agents do by default, in s.
REPORT_INTERVAL_S = 1.0
CONSISTENCY_CHECK_INTERVAL_S = 5.0
# Every change is told at once, so that nobody asks for one long past.
_KEPT_DELTAS = 8

# (router, event, now): it is sent to that router.
ReportTo = Callable[[str, ev.Event, float], None]


class ModelKeys:
    """The keys of `cache` as an agent has them, which hears of a step's events at its end, and their newest changes."""

    def __init__(self, cache: BlockCache) -> None:
        self.latest_seq = 0
        self._cache = cache
        self._deltas: deque[cached_blocks.Delta] = deque(maxlen=_KEPT_DELTAS)
        # Of the step under way.
        self._unheard: Sequence[Event] = ()

    @property
    def oldest_seq(self) -> int:
        """The first change that is still known; latest_seq + 1 when there is none."""
        return self._deltas[0].seq if self._deltas else self.latest_seq + 1

    @property
    def key_count(self) -> int:
        """How many keys there are."""
        came, went = _changes(self._unheard)
        return len(self._cache) - sum(map(len, came)) + sum(map(len, went))

    @property
    def digest(self) -> int:
        """Of all keys; it is reckoned anew each time."""
        return digest_of(Tier.DEVICE, self.keys(Tier.DEVICE))

    def keys(self, tier: Tier) -> Collection[int]:
        """The keys in `tier`: only an engine's own cache is modelled."""
        if tier is not Tier.DEVICE:
            return ()
        keys = set(self._cache.cached_hashes())
        for event in reversed(self._unheard):
            if isinstance(event, BlocksStored):
                keys.difference_update(_new_hashes(event))
            elif isinstance(event, BlocksRemoved):
                keys.update(_evicted_hashes(event))
        return keys

    def delta(self, seq: int) -> cached_blocks.Delta:
        """The change `seq`."""
        return self._deltas[seq - self.oldest_seq]

    def begin(self, events: Sequence[Event]) -> None:
        """A step has begun that ends with these events. Mutates."""
        self._unheard = events

    def apply(self, events: Sequence[Event]) -> bool:
        """A step has ended; whether that has changed any keys. Mutates."""
        self._unheard = ()
        came, went = _changes(events)
        if not any(came) and not any(went):
            return False
        added, removed = _concatenated(came), _concatenated(went)
        if any(isinstance(event, Preempted) for event in events):
            # What a preempted request had computed in this very step may be gone again.
            more, less = Counter(added), Counter(removed)
            added, removed = tuple((more - less).elements()), tuple((less - more).elements())
            if not added and not removed:
                return False
        self.latest_seq += 1
        self._deltas.append(cached_blocks.Delta(self.latest_seq, Tier.DEVICE, added, removed))
        return True


class SimulatedAgent:
    """Tells all routers of the keys of the instance `name`, over a stream to each that has welcomed `stream_id`; with `checks`
    also, now and then, what they must have by then, so that a lost report is noticed."""

    def __init__(self, name: str, stream_id: int, cache: BlockCache, report_to: ReportTo, *, checks: bool) -> None:
        self.keys = ModelKeys(cache)
        self._name = name
        self._stream_id = stream_id
        self._report_to = report_to
        self._check_interval_s = CONSISTENCY_CHECK_INTERVAL_S if checks else math.inf
        # By router.
        self._streams: dict[str, KeyStream] = {}

    def step_ended(self, events: Sequence[Event], now: float) -> None:
        """Tell what has changed. Mutates."""
        if self.keys.apply(events):
            self.tell(now)

    def welcomed(self, router: str, welcome: ev.Welcome, now: float) -> None:
        """A router answers this agent's hello: a new stream to it begins. Mutates."""
        stream = self._streams[router] = KeyStream(self.keys, self._check_interval_s)
        stream.welcome(welcome.resume_from_seq, now, snapshot=welcome.snapshot)
        self._tell(router, stream, now)

    def resync(self, router: str, now: float) -> None:
        """A router asks for all keys. Mutates."""
        stream = self._streams[router]
        stream.begin_snapshot()
        self._tell(router, stream, now)

    def tell(self, now: float) -> None:
        """Tell every router what is due. Mutates."""
        for router, stream in self._streams.items():
            self._tell(router, stream, now)

    def _tell(self, router: str, stream: KeyStream, now: float) -> None:
        while (message := stream.next_message(now)) is not None:
            self._report_to(router, ev.KeysReported(self._stream_id, self._name, _to_router(message)), now)


def _to_router(message: key_stream.KeyMessage) -> report_sync.KeyMessage:
    """A message as the router reads it from the wire."""
    match message:
        case cached_blocks.Delta():
            return report_sync.Delta(message.seq, message.tier.value, message.added, message.removed, message.cleared)
        case key_stream.SnapshotBegin():
            return report_sync.SnapshotBegin(message.seq)
        case key_stream.SnapshotChunk():
            return report_sync.SnapshotChunk(message.tier.value, message.keys)
        case key_stream.SnapshotEnd():
            return report_sync.SnapshotEnd(message.seq, message.key_count, message.digest)
        case key_stream.ConsistencyCheck():
            return report_sync.ConsistencyCheck(message.seq, message.key_count, message.digest)


def _changes(events: Sequence[Event]) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """The keys that came, and those that went, event by event."""
    came = [_new_hashes(event) for event in events if isinstance(event, BlocksStored)]
    return came, [_evicted_hashes(event) for event in events if isinstance(event, BlocksRemoved)]


def _new_hashes(stored: BlocksStored) -> tuple[int, ...]:
    """What was not there before."""
    if not stored.already_cached:
        return stored.hashes
    return tuple(value for value in stored.hashes if value not in stored.already_cached)


def _evicted_hashes(removed: BlocksRemoved) -> tuple[int, ...]:
    """What is not there any more."""
    if not removed.still_cached:
        return removed.hashes
    # Of two blocks of one hash that go together the second is the last.
    return tuple((Counter(removed.hashes) - Counter(removed.still_cached)).elements())


def _concatenated(parts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """All parts as one; mostly there is one, of hundreds of keys, which is not copied."""
    return parts[0] if len(parts) == 1 else tuple(chain.from_iterable(parts))

"""Costs of the services' work, in seconds of CPU, and the size of the fleet that a run stands for.

`python -m tests.virtual measure` prints each coefficient and its value measured on this machine. Run it again after a change to
one of the operations. The coefficients are about twice the values measured on an idle core of a two-core x86-64 virtual machine
with Python 3.11, because a router shares its core with other processes. They do not include the time of gRPC and of the kernel.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

# An event that the router state handles, with the conversion of its message, s.
EVENT_S = 5e-6
# A placement and its end, or one trial of a held request, s: without its candidates and the keys of its prompt.
PLACEMENT_S = 80e-6
# A candidate of a placement, s.
CANDIDATE_S = 0.9e-6
# A key of a placement's prompt, s.
PROMPT_KEY_S = 0.08e-6
# Check of whether a pool has room for a held request, per instance, s.
ROOM_S = 0.08e-6
# A key of a snapshot that an agent copies and sends, s.
SENT_KEY_S = 0.15e-6
# A key of a snapshot that a router reads and indexes, s.
REPORTED_KEY_S = 0.35e-6
# A key that a sweep of the index visits, s.
SWEPT_KEY_S = 0.5e-6
# A session parsed from Redis' reply, s.
SESSION_PARSED_S = 0.4e-6
# A session recalled into the affinity table, s.
SESSION_RECALLED_S = 1.1e-6
# A session freed with its pool, s.
SESSION_FREED_S = 0.3e-6
# A change of a session or reservation that is written to Redis, s.
CHANGE_WRITTEN_S = 3e-6
# An open reservation of a pool that a router takes over, s.
RESERVATION_TAKEN_S = 4e-6
# An instance in a message that describes the fleet, s.
FLEET_INSTANCE_S = 0.7e-6
# A recorded decision made again by WhatIf, s: without its candidates.
WHAT_IF_S = 40e-6
# A candidate of a decision made again, s.
WHAT_IF_CANDIDATE_S = 0.7e-6
# Redis' own time per field of a reply, s.
REDIS_FIELD_S = 1.2e-6
# Redis' own time per change that APPLY makes, s.
REDIS_CHANGE_S = 5e-6
# Redis' own time per command, s.
REDIS_COMMAND_S = 20e-6


@dataclass(frozen=True, slots=True)
class Declared:
    """Numbers of sessions, keys and instances of the fleet that a run stands for. The run builds only a few of each.

    0: as many as the run builds.
    """

    sessions: int = 0
    keys: int = 0
    instances: int = 0

    @property
    def large(self) -> bool:
        """Whether the declared fleet is larger than the built one."""
        return bool(self.sessions or self.keys or self.instances)

    def __str__(self) -> str:
        if not self.large:
            return "as it is"
        return f"{self.sessions:,} sessions, {self.keys:,} keys, {self.instances:,} instances"


AS_BUILT = Declared()
LARGEST = Declared(sessions=1_000_000, keys=4_000_000, instances=1_000)
# One of this many seeds stands for a large fleet.
LARGE_IN = 5


def draw(rng: random.Random) -> Declared:
    """Draw the size that a seed's fleet stands for: AS_BUILT for most seeds."""
    if rng.randrange(LARGE_IN):
        return AS_BUILT
    return Declared(
        sessions=rng.choice((100_000, 300_000, 1_000_000)),
        keys=rng.choice((1_000_000, 4_000_000)),
        instances=rng.choice((256, 1_000)),
    )

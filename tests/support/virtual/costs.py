"""What the services' work costs, in seconds of CPU, and the size of the fleet that a run stands for.

`python -m tests.virtual measure` prints each coefficient beside what it is on that machine. They are set to about twice what
they were on an idle core of a two-core x86-64 virtual machine with Python 3.11, for a core that others use too. The time of gRPC
and of the kernel is not in them. Run it again after a change to one of the operations.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

# An event that the state handles, with its message's conversion.
EVENT_S = 5e-6
# A placement, its end, and the next try of one that is held: beside its candidates and the keys of its prompt.
PLACEMENT_S = 80e-6
CANDIDATE_S = 0.9e-6
PROMPT_KEY_S = 0.08e-6
# Whether a pool has room for a held request, for each instance that is looked at.
ROOM_S = 0.08e-6
# A key of a snapshot: copied and sent by an agent; read and indexed by a router.
SENT_KEY_S = 0.15e-6
REPORTED_KEY_S = 0.35e-6
# A key that a sweep of the index looks at.
SWEPT_KEY_S = 0.5e-6
# A session: parsed from Redis' reply, recalled, freed with its pool; and a change of it, or of a reservation, written.
SESSION_PARSED_S = 0.4e-6
SESSION_RECALLED_S = 1.1e-6
SESSION_FREED_S = 0.3e-6
CHANGE_WRITTEN_S = 3e-6
# An open reservation of a pool that is taken over.
RESERVATION_TAKEN_S = 4e-6
# An instance in a message that tells of the fleet.
FLEET_INSTANCE_S = 0.7e-6
# A recorded decision made again, beside its candidates.
WHAT_IF_S = 40e-6
WHAT_IF_CANDIDATE_S = 0.7e-6
# Redis' own time: for a field that it tells, a change that APPLY makes, and any command.
REDIS_FIELD_S = 1.2e-6
REDIS_CHANGE_S = 5e-6
REDIS_COMMAND_S = 20e-6


@dataclass(frozen=True, slots=True)
class Declared:
    """How many sessions, keys and instances a fleet has, for which a run builds a few of each. 0: as many as it builds."""

    sessions: int = 0
    keys: int = 0
    instances: int = 0

    @property
    def large(self) -> bool:
        """Whether it stands for more than is built."""
        return bool(self.sessions or self.keys or self.instances)

    def __str__(self) -> str:
        if not self.large:
            return "as it is"
        return f"{self.sessions:,} sessions, {self.keys:,} keys, {self.instances:,} instances"


AS_BUILT = Declared()
LARGEST = Declared(sessions=1_000_000, keys=4_000_000, instances=1_000)
# One seed of so many stands for a large fleet.
LARGE_IN = 5


def draw(rng: random.Random) -> Declared:
    """The size that a seed's fleet stands for: mostly what it builds."""
    if rng.randrange(LARGE_IN):
        return AS_BUILT
    return Declared(
        sessions=rng.choice((100_000, 300_000, 1_000_000)),
        keys=rng.choice((1_000_000, 4_000_000)),
        instances=rng.choice((256, 1_000)),
    )

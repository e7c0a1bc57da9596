"""Schedule of garbage collections in a service: young objects as Python decides, all objects once a minute.

Python (3.11) starts a full collection whenever the objects that none has visited yet are a quarter of the others. A full
collection blocks the process. A router has about 50 objects for each agent's stream. While a thousand agents join at once, it
would run one full collection after another, of 30 to 40 ms each. After they have joined, a full collection takes about 12 ms.
"""

from __future__ import annotations

import asyncio
import gc

# Interval between two full collections, s.
FULL_INTERVAL_S = 60.0
# Number of collections of generation 0 between two of generation 1. With Python's 10, the latter take 5 to 8 ms.
_MIDDLE = 2
# Number of collections of generation 1 between two of generation 2: more than one interval can have.
_NEVER = 2**31 - 1


async def collect_garbage(interval_s: float = FULL_INTERVAL_S) -> None:
    """Run a full collection every `interval_s` until cancelled. Objects that exist at the start are never visited again."""
    gc.collect()
    gc.freeze()
    young, _, _ = gc.get_threshold()
    gc.set_threshold(young, _MIDDLE, _NEVER)
    while True:
        await asyncio.sleep(interval_s)
        gc.collect()

"""When a service looks for what only refers to itself: among young objects as Python decides, among all of them once a minute.

Python (3.11) walks all objects whenever those that it has not looked at are a quarter of the others, and nothing else runs
meanwhile. A router has some 50 for each agent's stream. A thousand agents that join at once would have it do so again and again,
for 30 to 40 ms each, in the middle of it; when they are there it takes some 12 ms.
"""

from __future__ import annotations

import asyncio
import gc

FULL_INTERVAL_S = 60.0
# Collections of what is youngest between two of what has outlived one: with Python's 10 the latter take 5 to 8 ms.
_MIDDLE = 2
# As many of the younger collections do not come to pass within the interval.
_NEVER = 2**31 - 1


async def collect_garbage(interval_s: float = FULL_INTERVAL_S) -> None:
    """Until cancelled. What is there when it begins is never looked at again."""
    gc.collect()
    gc.freeze()
    young, _, _ = gc.get_threshold()
    gc.set_threshold(young, _MIDDLE, _NEVER)
    while True:
        await asyncio.sleep(interval_s)
        gc.collect()

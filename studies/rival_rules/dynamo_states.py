"""Draws states for Dynamo's own selection core and prints each with its choice, one line of JSON.

Runs in Dynamo's own environment, which has no part of Pointsman: `python dynamo_states.py COUNT SEED`. The core is
`dynamo._core.SelectionService`, which is told of workers, bookings and KV events; it runs no request.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq
from dynamo._core import SelectionService

BLOCK = 16
WORKERS = (1, 2, 3, 4)
# Maximum number of open requests at a worker, and of blocks that a worker keeps.
MOST_OPEN, MOST_BLOCKS = 6, 1_500
# Timeout of an event on its way into the core, s.
EVENT_S = 10.0


@dataclass
class Open:
    """A booked request. `effective`: tokens that Dynamo counts to prefill, 0 when that is done."""

    name: str
    tokens: list[int]
    effective: int


@dataclass
class Worker:
    """What one worker has: its open requests, and the prompts whose blocks it keeps, oldest first. `seq`: of its next event."""

    number: int  # Dynamo's worker_id, one of WORKERS
    events: Any  # the ZMQ socket (PUB) of its KV events, which the core reads
    open: list[Open] = field(default_factory=list)  # at most MOST_OPEN
    kept: list[list[int]] = field(default_factory=list)  # token ids, whole blocks of each prompt
    seq: int = 0

    def publish(self, event: list[Any]) -> None:
        """Send one KV event as vLLM does."""
        batch = msgspec.msgpack.encode([time.time(), [event], 0])
        self.events.send_multipart([b"", self.seq.to_bytes(8, "big"), batch])
        self.seq += 1

    def cached(self, tokens: list[int]) -> int:
        """Return how many leading blocks of a prompt it keeps."""
        return max((_common(tokens, prompt) // BLOCK for prompt in self.kept), default=0)

    def keep(self, tokens: list[int]) -> None:
        """Store a prompt's whole blocks, or all of it anew after its cache was cleared because it is full."""
        if sum(map(len, self.kept)) > MOST_BLOCKS * BLOCK:
            self.kept.clear()
            self.publish(["AllBlocksCleared"])
        first, blocks = self.cached(tokens), len(tokens) // BLOCK
        if first < blocks:
            hashes = _hashes(tokens)
            parent = hashes[first - 1] if first else None
            new = tokens[first * BLOCK : blocks * BLOCK]
            self.publish(["BlockStored", hashes[first:], parent, new, BLOCK, None, "GPU", None])
            self.kept.append(tokens[: blocks * BLOCK])


class Sessions:
    """Draws prompts: turns of sessions that share one of three system prompts, and single prompts."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._fresh = itertools.count(1)
        self._system = [self._new(rng.randrange(4, 60) * BLOCK) for _ in range(3)]
        self._sessions: list[list[int]] = []

    def next(self) -> list[int]:
        """Return the next prompt."""
        if self._sessions and self._rng.random() < 0.7:
            at = self._rng.randrange(len(self._sessions))
            self._sessions[at] = self._sessions[at] + self._new(self._rng.randrange(8, 900))
        else:
            begun = self._rng.choice(self._system) if self._rng.random() < 0.6 else []
            self._sessions.append(begun + self._new(self._rng.randrange(20, 3_000)))
            at = len(self._sessions) - 1
        prompt = self._sessions[at]
        if len(prompt) > 12_000 or len(self._sessions) > 30:
            del self._sessions[at]
        return prompt

    def _new(self, count: int) -> list[int]:
        return [next(self._fresh) for _ in range(count)]


async def main(count: int, seed: int) -> None:
    """Print `count` states."""
    rng = random.Random(seed)
    core, context = SelectionService(), zmq.Context()
    workers = [await _joined(core, context, number) for number in WORKERS]
    await asyncio.sleep(1.0)
    sessions = Sessions(rng)
    for number in range(count):
        prompt = sessions.next()
        await _seen(core, workers, prompt)
        chosen = await core.select({"token_ids": prompt})
        state = {
            "rival": "dynamo",
            "input": len(prompt),
            "chosen": f"w{chosen['worker_id']}",
            "instances": {
                f"w{worker.number}": {
                    "cached": worker.cached(prompt) * BLOCK,
                    "requests": len(worker.open),
                    "pending": sum(each.effective for each in worker.open),
                    "ongoing": sum(len(each.tokens) for each in worker.open),
                    "decoding": sum(len(each.tokens) for each in worker.open if not each.effective),
                }
                for worker in workers
            },
            # Blocks that several open requests of a worker share, or this prompt with them: the core counts each once.
            "shared_blocks": max(_shared(worker, prompt) for worker in workers),
        }
        print(json.dumps(state), flush=True)
        # Half of the requests go elsewhere than chosen, so that states differ more than a balanced fleet's.
        to = workers[chosen["worker_id"] - 1] if rng.random() < 0.5 else rng.choice(workers)
        if len(to.open) < MOST_OPEN:
            await _book(core, to, f"r{number}", prompt)
        for worker in workers:
            for each in list(worker.open):
                await _go_on(core, worker, each, rng)


async def _joined(core: SelectionService, context: zmq.Context[Any], number: int) -> Worker:
    socket = context.socket(zmq.PUB)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    await core.upsert_worker({
        "worker_id": number, "endpoint": f"http://127.0.0.1:{number}", "block_size": BLOCK, "data_parallel_start_rank": 0,
        "data_parallel_size": 1, "kv_events_endpoint": f"tcp://127.0.0.1:{port}", "total_kv_blocks": 20_000,
        "max_num_batched_tokens": 8_192,
    })  # fmt: skip
    return Worker(number, socket)


async def _seen(core: SelectionService, workers: list[Worker], prompt: list[int]) -> None:
    """Wait until the core knows of the prompt what the workers keep. Events travel on their own thread."""
    wanted = {worker.number: worker.cached(prompt) for worker in workers}
    end = time.monotonic() + EVENT_S
    while True:
        overlaps = (await core.overlap_scores({"token_ids": prompt}))["workers"]
        found = dict.fromkeys(WORKERS, 0) | {overlap["worker_id"]: overlap["device_blocks"] for overlap in overlaps}
        if found == wanted:
            return
        if time.monotonic() > end:
            raise RuntimeError(f"the core has {found}, the workers keep {wanted}")
        await asyncio.sleep(0.002)


async def _book(core: SelectionService, to: Worker, name: str, prompt: list[int]) -> None:
    effective = len(prompt) - to.cached(prompt) * BLOCK
    body = {"selection_id": name, "worker_id": to.number, "token_ids": prompt, "effective_prefill_tokens": effective}
    await core.create_reservation(body)
    to.open.append(Open(name, prompt, effective))


async def _go_on(core: SelectionService, at: Worker, one: Open, rng: random.Random) -> None:
    drawn = rng.random()
    if one.effective and drawn < 0.35:
        await core.prefill_complete(one.name)
        one.effective = 0
        at.keep(one.tokens)
    elif not one.effective and drawn < 0.25:
        await core.free_reservation(one.name)
        at.open.remove(one)


def _shared(one: Worker, prompt: list[int]) -> int:
    """Return the most blocks that two of a worker's open requests, or one and `prompt`, have in common."""
    texts = [*(each.tokens for each in one.open), prompt]
    return max((_common(a, b) // BLOCK for a, b in itertools.combinations(texts, 2)), default=0)


def _hashes(tokens: list[int]) -> list[int]:
    """Return the hashes of a prompt's whole blocks, each of all tokens up to its end. All workers have the same, as vLLM's do."""
    found, parent = [], 0
    for at in range(BLOCK, len(tokens) + 1, BLOCK):
        parent = hash((parent, *tokens[at - BLOCK : at])) & (1 << 62) - 1
        found.append(parent)
    return found


def _common(one: list[int], other: list[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))

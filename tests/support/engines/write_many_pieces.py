"""Writes as many pieces as the arguments say, each way once, by Mooncake over TCP; run by a Python that has vLLM's packages.

Prints a line for each: the number of pieces, the status of the write, and whether the receiver has the bytes. Then the last
number of pieces is written by as many threads at once as vLLM's sender has, and their statuses are printed.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor

import torch
from mooncake.engine import TransferEngine

from pointsman_connector.layerwise.sleeping_writes import SleepingTransferEngine

PIECE_BYTES = 512
SENDER_THREADS = 10


def engine(pieces: int) -> tuple[TransferEngine, torch.Tensor]:
    """Return a transfer engine, and the memory of so many pieces that it has registered."""
    memory, one = torch.zeros(pieces * PIECE_BYTES, dtype=torch.uint8), TransferEngine()
    if one.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") or one.register_memory(memory.data_ptr(), memory.nbytes):
        raise RuntimeError("no transfer engine")
    return one, memory


counts = [int(word) for word in sys.argv[1:]]
(sender, source), (receiver, target) = engine(max(counts)), engine(max(counts))
source.random_(0, 255)
session = f"127.0.0.1:{receiver.get_rpc_port()}"
for count in counts:
    target.zero_()
    froms = [source.data_ptr() + at * PIECE_BYTES for at in range(count)]
    # In reverse, so that no two pieces can be merged.
    tos = [target.data_ptr() + (count - 1 - at) * PIECE_BYTES for at in range(count)]
    status = SleepingTransferEngine(sender).batch_transfer_sync_write(session, froms, tos, [PIECE_BYTES] * count)
    arrived = torch.equal(source.view(-1, PIECE_BYTES)[:count], target.view(-1, PIECE_BYTES)[:count].flip(0))
    print(count, status, arrived, flush=True)
with ThreadPoolExecutor(SENDER_THREADS) as threads:
    one = SleepingTransferEngine(sender)
    writes = [
        threads.submit(one.batch_transfer_sync_write, session, froms, tos, [PIECE_BYTES] * counts[-1])
        for _ in range(SENDER_THREADS)
    ]
print(sorted({write.result() for write in writes}), flush=True)
# The transfer engines' threads do not end.
os._exit(0)

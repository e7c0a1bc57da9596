"""How much of a KV transfer hides behind its computation, with plain tensors and the transfer engine: no vLLM, any device.

Two processes. One computes layers (matrix products of a chosen cost, then the layer's K and V into its cache) and sends; the
other only lends its memory. Measured is the tail: from the end of the last layer's computation to the last byte written, once
with all layers sent after the last one, once with each layer sent when its own event has passed.

    python push_tensors.py --device cuda --protocol rdma --layers 48 --tokens 8192 --layer-ms 8

Run it with the Python of an engine's environment (torch, and mooncake-transfer-engine or its non-cuda build).
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from multiprocessing.connection import Connection
from queue import SimpleQueue

import torch
from mooncake.engine import TransferEngine

from pointsman_connector.layerwise.event_waiter import EventWaiter


def cache(arguments: argparse.Namespace) -> torch.Tensor:
    """[layers, bytes of a layer's K and V] on the device."""
    size = arguments.tokens * arguments.bytes_per_token
    return torch.zeros((arguments.layers, size), dtype=torch.uint8, device=arguments.device)


def engine(arguments: argparse.Namespace, tensor: torch.Tensor) -> tuple[TransferEngine, str]:
    """A transfer engine that may touch `tensor`, and its address."""
    transfer_engine = TransferEngine()
    if transfer_engine.initialize(arguments.host, "P2PHANDSHAKE", arguments.protocol, arguments.nic) != 0:
        raise RuntimeError("the transfer engine does not start")
    if transfer_engine.register_memory(tensor.data_ptr(), tensor.nbytes) != 0:
        raise RuntimeError("the transfer engine cannot use this memory")
    return transfer_engine, f"{arguments.host}:{transfer_engine.get_rpc_port()}"


def lend(arguments: argparse.Namespace, pipe: Connection) -> None:
    """The receiving process: tells where its memory is, answers what is in it, until told to stop."""
    tensor = cache(arguments)
    _, address = engine(arguments, tensor)
    pipe.send((address, tensor.data_ptr()))
    while pipe.recv() == "sums":
        pipe.send(list(zip(tensor.amin(1).tolist(), tensor.amax(1).tolist(), strict=True)))


class Layers:
    """The computation: `run` queues all layers on the device and calls `saved` after each."""

    def __init__(self, arguments: argparse.Namespace, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._own_stream = arguments.stream == "own"
        self._own: torch.cuda.Stream | None = None
        self._matrix = torch.randn(2048, 2048, device=arguments.device)
        self._events = EventWaiter(
            partial(torch.cuda.Event, blocking=True) if torch.cuda.is_available() else None, self._failed
        )
        self._repeats = 1
        # The first product also loads its kernels.
        self._work()
        self._wait()
        began = time.perf_counter()
        for _ in range(8):
            self._work()
        self._wait()
        self._repeats = max(round(arguments.layer_ms / 1e3 / ((time.perf_counter() - began) / 8)), 1)

    def _work(self) -> None:
        for _ in range(self._repeats):
            torch.mm(self._matrix, self._matrix)

    def _failed(self, error: BaseException) -> None:
        print(f"an event could not be waited for: {error}", file=sys.stderr)
        os._exit(1)

    def _wait(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def run(self, value: int, saved: SimpleQueue[int | None]) -> float:
        """Compute; returns when the last layer's computation is over, in seconds of the performance counter. `saved` gets each
        layer when it is computed, and None at the end."""
        with self._stream():
            self._launch(value, saved)
        self._wait()
        computed = time.perf_counter()
        self._events.in_order(partial(saved.put, None))
        return computed

    def _stream(self) -> AbstractContextManager[object]:
        if self._own is None and self._own_stream and torch.cuda.is_available():
            self._own = torch.cuda.Stream()
        return torch.cuda.stream(self._own) if self._own is not None else nullcontext()

    def _launch(self, value: int, saved: SimpleQueue[int | None]) -> None:
        for layer in range(len(self._tensor)):
            self._work()
            self._tensor[layer].fill_(value)
            self._events.after_launched(partial(saved.put, layer))


def send(engine: TransferEngine, tensor: torch.Tensor, remote: tuple[str, int], layers: list[int], pieces: int) -> None:
    """Write whole layers to the same places of the other tensor, each in so many pieces."""
    size = tensor.shape[1] // pieces
    offsets = [layer * tensor.shape[1] + piece * size for layer in layers for piece in range(pieces)]
    sources = [tensor.data_ptr() + offset for offset in offsets]
    targets = [remote[1] + offset for offset in offsets]
    if engine.batch_transfer_sync_write(remote[0], sources, targets, [size] * len(offsets)) != 0:
        raise RuntimeError("the transfer failed")


def tail(
    engine: TransferEngine,
    tensor: torch.Tensor,
    remote: tuple[str, int],
    layers: Layers,
    value: int,
    pieces: int,
    *,
    each: bool,
) -> float:
    """Seconds between the last layer's end and the last byte's arrival."""
    saved: SimpleQueue[int | None] = SimpleQueue()
    ended: list[float] = []

    def push() -> None:
        ready: list[int] = []
        over = False
        while not over:
            # As the connector: a write has all that is ready when it starts.
            found = [saved.get()]
            while not saved.empty():
                found.append(saved.get())
            ready += [layer for layer in found if layer is not None]
            over = found[-1] is None
            if ready and (each or over):
                send(engine, tensor, remote, ready, pieces)
                ready = []
        ended.append(time.perf_counter())

    pusher = threading.Thread(target=push)
    pusher.start()
    computed = layers.run(value, saved)
    pusher.join()
    return ended[0] - computed


def main() -> None:
    """Print the medians, and check that every layer arrived."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--protocol", default="tcp", help="tcp, rdma, nvlink ...: whatever the transfer engine knows")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--nic", default="", help="RDMA device")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--bytes-per-token", type=int, default=2048, help="K and V of one token in one layer")
    parser.add_argument("--layer-ms", type=float, default=8.0, help="computation of one layer")
    parser.add_argument("--pieces", type=int, default=1, help="pieces of a layer; scattered blocks are many")
    parser.add_argument("--stream", choices=("own", "default"), default="own", help="the stream that computes")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    other = context.Process(target=lend, args=(arguments, theirs), daemon=True)
    other.start()
    remote = pipe.recv()
    tensor = cache(arguments)
    transfer_engine, _ = engine(arguments, tensor)
    layers = Layers(arguments, tensor)
    found: dict[bool, list[float]] = {False: [], True: []}
    for number in range(arguments.rounds):
        for each in found:
            value = (2 * number + each) % 250 + 1
            found[each].append(tail(transfer_engine, tensor, remote, layers, value, arguments.pieces, each=each))
            pipe.send("sums")
            if pipe.recv() != [(value, value)] * arguments.layers:
                raise SystemExit("the receiver has other bytes")
    megabytes = tensor.nbytes / 2**20
    print(
        f"{arguments.device}, {arguments.protocol}: {megabytes:.0f} MB in {arguments.layers} layers of {arguments.layer_ms:g} ms"
    )
    print(f"tail after the prefill   {statistics.median(found[False]) * 1e3:8.2f} ms")
    print(f"tail layer by layer      {statistics.median(found[True]) * 1e3:8.2f} ms")
    pipe.send("stop")
    other.join()


if __name__ == "__main__":
    main()

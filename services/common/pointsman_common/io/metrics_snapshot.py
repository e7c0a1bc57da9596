"""Metrics of a process at one moment, for the page of several processes: encoded pieces of a page, kept in a file, and summed."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

import msgspec

from pointsman_common.io.metrics_page import PIECE, Piece

_DECODER = msgspec.msgpack.Decoder(Piece)
_LENGTH_BYTES = 4
_MODEL = re.compile(r'[{,]model="((?:[^"\\]|\\.)*)"')


async def encoded(found: AsyncIterator[Piece]) -> list[bytes]:
    """Return these pieces of a page as messages."""
    return [msgspec.msgpack.encode(piece) async for piece in found]


def keep(file: Path, snapshot: Iterable[bytes]) -> None:
    """Replace `file` by the counters and histograms of a snapshot, for counters_in(). It stays as it is if the disk is full.

    One piece after the other, so that other threads run between two of them.
    """
    with suppress(OSError):
        new = file.with_suffix(".new")
        with new.open("wb") as out:
            for data in snapshot:
                if not _DECODER.decode(data).head.endswith(" gauge\n"):
                    out.write(len(data).to_bytes(_LENGTH_BYTES, "big"))
                    out.write(data)
        new.replace(file)


def counters_in(file: Path) -> list[bytes]:
    """Return the counters and histograms that keep() has written; none without the file."""
    found = []
    with suppress(OSError), file.open("rb") as kept:
        while length := int.from_bytes(kept.read(_LENGTH_BYTES), "big"):
            found.append(kept.read(length))
    return found


async def summed(snapshots: Iterable[Iterable[bytes]], least: Collection[str] = ()) -> AsyncIterator[Piece]:
    """Yield the pieces of a page with the sum of each series over all snapshots; of the metrics named in `least` the minimum. The
    event loop runs other tasks between two of them."""
    heads: dict[str, str] = {}
    values: dict[str, dict[str, float]] = {}
    for snapshot in snapshots:
        for data in snapshot:
            piece = _DECODER.decode(data)
            heads.setdefault(piece.name, piece.head)
            of_family = values.setdefault(piece.name, {})
            lower = piece.name in least
            for series, value in piece.series:
                before = of_family.get(series)
                of_family[series] = value if before is None else min(before, value) if lower else before + value
            await asyncio.sleep(0)
    for name, head in heads.items():
        # Families are freed one by one, for which they are taken out.
        rest = iter(values.pop(name).items())
        while found := [*islice(rest, PIECE)]:
            yield Piece(name, head, found)
            await asyncio.sleep(0)
        yield Piece(name, head, [])


class InheritedCounters:
    """Counters of the processes that this one replaces, which count as its own.

    They end as its own do. A process has series with the label `model` for the models that it counts, one of them in the family
    `models_in`. From `forget_s` after the start, when it has heard of all of them, those of other models are dropped.
    """

    def __init__(self, models_in: str, forget_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns s."""
        self._models_in = models_in
        self._forget_at = clock() + forget_s
        self._clock = clock
        self._by_model: dict[str, list[bytes]] = {}

    async def read(self, file: Path) -> None:
        """Take the counters that keep() has written into `file`. Mutates."""
        for data in await asyncio.to_thread(counters_in, file):
            piece = _DECODER.decode(data)
            of_model: dict[str, list[tuple[str, float]]] = {}
            for series in piece.series:
                of_model.setdefault(_model_of(series[0]), []).append(series)
            for model, found in of_model.items():
                self._by_model.setdefault(model, []).append(msgspec.msgpack.encode(piece._replace(series=found)))
            await asyncio.sleep(0)

    async def with_own(self, own: Sequence[bytes], least: Collection[str] = ()) -> Sequence[bytes]:
        """Return the snapshot `own` of this process with what it has inherited, in sums as by summed(). Mutates."""
        if self._by_model and self._clock() >= self._forget_at:
            mine = [piece for piece in map(_DECODER.decode, own) if piece.name == self._models_in]
            models = {"", *(_model_of(series) for piece in mine for series, _ in piece.series)}
            self._by_model = {model: found for model, found in self._by_model.items() if model in models}
        return await encoded(summed([own, *self._by_model.values()], least)) if self._by_model else own


def _model_of(series: str) -> str:
    found = _MODEL.search(series)
    return found[1] if found else ""

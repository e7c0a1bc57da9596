"""Metrics of a process at one moment, for the page of several processes: encoded pieces of a page, kept in a file, and summed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

import msgspec

from pointsman_common.io.metrics_page import PIECE, Piece

_DECODER = msgspec.msgpack.Decoder(Piece)


async def encoded(found: AsyncIterator[Piece]) -> list[bytes]:
    """Return these pieces of a page as messages."""
    return [msgspec.msgpack.encode(piece) async for piece in found]


def keep(file: Path, snapshot: Sequence[bytes]) -> None:
    """Replace `file` by a snapshot, for counters_in(). It stays as it is if the disk is full."""
    with suppress(OSError):
        new = file.with_suffix(".new")
        new.write_bytes(msgspec.msgpack.encode(snapshot))
        new.replace(file)


def counters_in(file: Path) -> list[bytes]:
    """Return the counters and histograms of the snapshot in `file`; none without it."""
    try:
        kept = msgspec.msgpack.decode(file.read_bytes(), type=list[bytes])
    except OSError:
        return []
    return [data for data in kept if not _DECODER.decode(data).head.endswith(" gauge\n")]


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

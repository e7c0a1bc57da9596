"""Cached blocks on disk, so that a restarted agent keeps the cached blocks of an engine that still runs.

A file is one msgpack map, written to a temporary name and renamed. `clean` means that the agent sent nothing to any router after
it wrote the file. Only then may the sequence of deltas continue where it stopped. Otherwise the sequence jumps ahead, and routers
request a snapshot.
"""

from __future__ import annotations

import math
import os
from array import array
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote

import msgspec
import structlog

from pointsman_agent.core.cached_blocks import Block, BlockLocation, CachedBlocks
from pointsman_agent.core.grouped_blocks import Group
from pointsman_agent.core.kv_events import BlockHash

log = structlog.get_logger()

FORMAT = 2
# Age from which files are removed when an agent starts, s. An engine that runs has published more since than it can replay.
OLD_S = 7 * 86_400.0
# Number of deltas by which an unclean sequence jumps ahead: more than an agent can send between two saves.
SEQ_JUMP = 1 << 32

SavedBlock = tuple[BlockHash, bytes, list[tuple[BlockLocation, int]]]
PackedNode = tuple[BlockHash, BlockHash | None, bytes, list[tuple[int, int]]]


class SavedState(msgspec.Struct, array_like=False):
    """Saved state of one instance. Files of older agents do not have the fields from `groups` on, and older agents ignore
    them."""

    format: int  # FORMAT of the agent that wrote the file; a file with another number is ignored
    clean: bool  # nothing was sent to a router after the file was written
    process: str  # the engine's identity; empty if the engine does not report one
    incarnation: str  # as routers know it
    model: str  # the instance's pool; the state is not restored for another one
    applied: int  # number of the last KV-event batch applied
    applied_digest: int  # XXH3-64 of its payload; 0: unknown
    latest_seq: int  # number of the last delta
    blocks: list[SavedBlock]  # each (engine hash, its keys as u64 in native byte order, [(location, references)])
    # Group -> (block size, needed blocks), of an engine with several KV cache groups.
    groups: dict[int, tuple[int, int]] = {}
    nodes: list[PackedNode] = []  # those of such an engine: (engine hash, its parent's, keys, [(group, references)])
    links: list[tuple[BlockHash | None, int]] = []  # parent and depth of each block, in the order of `blocks`
    # Each (last block, location, the blocks before it).
    chunks: list[tuple[BlockHash, BlockLocation, list[BlockHash]]] = []
    chunk_blocks: int = 0  # length of an offloaded chunk, in blocks; 0: none was seen
    extra_keys_seen: bool = False  # whether a block had extra keys (cache salt, images)


def to_saved_state(
    cached_blocks: CachedBlocks, *, clean: bool, process: str, incarnation: str, applied: int, applied_digest: int
) -> SavedState:
    """Return a copy of the cached blocks and their position in both sequences. Later changes do not affect the copy."""
    blocks: list[SavedBlock] = [
        (name, array("Q", block.keys).tobytes(), list(block.refs.items()))
        for name, block in cached_blocks.blocks.items()
    ]
    grouped = cached_blocks.grouped
    return SavedState(
        FORMAT,
        clean,
        process,
        incarnation,
        cached_blocks.model,
        applied,
        applied_digest,
        cached_blocks.latest_seq,
        blocks,
        groups={index: (group.block_size, group.needed) for index, group in grouped.groups.items()} if grouped else {},
        nodes=[
            (name, parent, array("Q", keys).tobytes(), list(refs.items()))
            for name, parent, keys, refs in (grouped.saved() if grouped else ())
        ],
        links=[(block.parent, block.depth) for block in cached_blocks.blocks.values()],
        chunks=[(name, place, list(members)) for (name, place), members in cached_blocks.chunks.items()],
        chunk_blocks=cached_blocks.chunk_blocks,
        extra_keys_seen=cached_blocks.extra_keys_seen,
    )


def restore_cached_blocks(state: SavedState, *, capacity_blocks: int, speculative: bool = False) -> CachedBlocks:
    """Return cached blocks equal to those that `state` was made from. The sequence jumps by SEQ_JUMP unless `state` is clean."""
    latest_seq = state.latest_seq if state.clean else state.latest_seq + SEQ_JUMP
    cached_blocks = CachedBlocks(
        state.model, capacity_blocks=capacity_blocks, speculative=speculative, latest_seq=latest_seq
    )
    if state.groups:
        groups = {index: Group(size, needed) for index, (size, needed) in state.groups.items()}
        cached_blocks.restore_grouped(
            groups, ((name, parent, _unpacked(packed), dict(refs)) for name, parent, packed, refs in state.nodes)
        )
        return cached_blocks
    cached_blocks.extra_keys_seen = state.extra_keys_seen
    cached_blocks.chunk_blocks = state.chunk_blocks
    cached_blocks.chunks = {(name, place): tuple(members) for name, place, members in state.chunks}
    cached_blocks.restore(_entries(state))
    return cached_blocks


def _entries(state: SavedState) -> Iterable[tuple[BlockHash, Block]]:
    links = state.links or [(None, 0)] * len(state.blocks)
    for (name, packed, refs), (parent, depth) in zip(state.blocks, links, strict=True):
        yield name, Block(_unpacked(packed), dict(refs), parent, depth)


def _unpacked(packed: bytes) -> tuple[int, ...]:
    keys = array("Q")
    keys.frombytes(packed)
    return tuple(keys)


class StateFile:
    """The state file of one instance in `folder`."""

    def __init__(self, folder: Path, instance_id: str) -> None:
        self.path = folder / f"{quote(instance_id, safe='')}.blocks"

    def save(self, state: SavedState) -> None:
        """Replace the file atomically. Raises OSError."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_suffix(f".{os.getpid()}.tmp")
        with beside.open("wb") as file:
            file.write(msgspec.msgpack.encode(state))
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self.path)

    def load(self) -> SavedState | None:
        """Return the last saved state; None if there is no file or the file has another version of the format.

        Raises OSError, and msgspec.MsgspecError or ValueError if the file is damaged.
        """
        if not self.path.is_file():
            return None
        raw = self.path.read_bytes()
        if msgspec.msgpack.decode(raw, type=_Header).format != FORMAT:
            return None
        return msgspec.msgpack.decode(raw, type=SavedState)


def remove_states(folder: Path, instance_id: str) -> None:
    """Remove the files of an engine that does not come back. `instance_id`: its instance's id, without a rank."""
    file = StateFile(folder, instance_id).path
    _remove([file, *folder.glob(f"{file.stem}{quote('/', safe='')}*.blocks")])


def remove_old_states(folder: Path, now: float) -> None:
    """Remove the files that were last written OLD_S before `now`, unix s: those of engines that left while no agent ran."""
    _remove(folder.glob("*.blocks"), written_before=now - OLD_S)


def _remove(files: Iterable[Path], written_before: float = math.inf) -> None:
    for file in files:
        try:
            if file.stat().st_mtime < written_before:
                file.unlink()
        except FileNotFoundError:
            continue
        except OSError as error:
            log.warning("a saved state cannot be removed", path=str(file), reason=error.strerror or str(error))


class _Header(msgspec.Struct):
    format: int

"""An instance of which a damaged state file is left is followed all the same, from nothing."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import MagicMock

import zmq
import zmq.asyncio
from structlog.testing import capture_logs

from pointsman.agent.v1 import agent_pb2 as pb
from pointsman_agent.core.cached_blocks import CachedBlocks
from pointsman_agent.io.instance_monitor import AgentContext, InstanceMonitor
from pointsman_agent.io.kv_subscriber import KvEventSource
from pointsman_agent.io.state_file import StateFile, to_saved_state
from tests.support.kv_events import store

INSTANCE = "10.0.0.7:8000"


async def followed(folder: Path, context: zmq.asyncio.Context) -> InstanceMonitor:
    """Return the monitor of an instance that is ready to be reported."""
    agent_context = AgentContext({}, MagicMock(), context, "host-1", folder, 1.0, 60.0, 60.0)
    monitor = InstanceMonitor(
        agent_context,
        pb.Instance(instance_id=INSTANCE, model="tiny", block_size=32, prefix_mode=pb.PREFIX_MODE_EXACT),
        KvEventSource("inproc://events"),
        process="p",
        capacity_blocks=10,
        speculative=False,
        saw_start=False,
    )
    await monitor.prepare()
    return monitor


async def test_a_state_file_that_is_damaged_anywhere_is_ignored_or_restored(tmp_path: Path) -> None:
    full = store((1, 2), kv_cache_spec_kind="full_attention", group_idx=0)
    window = store((1, 2), kv_cache_spec_kind="sliding_window", kv_cache_spec_sliding_window=64, group_idx=1)
    cached_blocks = CachedBlocks("tiny")
    cached_blocks.apply([full, window])
    assert cached_blocks.grouped is not None
    file = StateFile(tmp_path, INSTANCE)
    file.save(to_saved_state(cached_blocks, clean=True, process="p", incarnation="i", applied=1, applied_digest=7))
    raw = file.path.read_bytes()
    context = zmq.asyncio.Context()
    events = context.socket(zmq.PUB)
    events.bind("inproc://events")
    monitor = await followed(tmp_path, context)
    assert monitor.instance.incarnation == "i"
    await monitor.stop("the test is over")
    ignored = 0
    for at in range(len(raw)):
        file.path.write_bytes(raw[:at] + bytes([raw[at] ^ 0x80]) + raw[at + 1 :])
        with capture_logs() as logs:
            monitor = await followed(tmp_path, context)
        await monitor.stop("the test is over")
        ignored += any(entry["event"] == "the saved state cannot be used" for entry in logs)
    assert ignored > len(raw) / 2
    context.destroy(linger=0)

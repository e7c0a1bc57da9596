"""What an agent writes to its disk is what it reads again."""

from __future__ import annotations

import os
import random
from pathlib import Path

from pointsman_agent.core.cached_blocks import CachedBlocks
from pointsman_agent.io.state_file import (
    OLD_S,
    SEQ_JUMP,
    StateFile,
    remove_old_states,
    remove_states,
    restore_cached_blocks,
    to_saved_state,
)
from pointsman_common.core.key_report_types import Tier
from tests.support.kv_events import store


def test_state_round_trip(tmp_path: Path) -> None:
    cached_blocks = CachedBlocks("tiny")
    rng = random.Random(3)
    for _ in range(50):
        path = tuple(rng.randint(1, 3) for _ in range(rng.randint(1, 5)))
        cached_blocks.apply([store(path, medium=rng.choice(["GPU", "CPU"]), ownership=rng.choice([None, "disk"]))])
    file = StateFile(tmp_path / "deep" / "er", "10.0.0.7:8000/1")
    assert file.load() is None
    for clean in (True, False):
        file.save(
            to_saved_state(cached_blocks, clean=clean, process="p", incarnation="i", applied=49, applied_digest=7)
        )
        state = file.load()
        assert state is not None
        assert (state.process, state.incarnation, state.applied, state.applied_digest) == ("p", "i", 49, 7)
        again = restore_cached_blocks(state, capacity_blocks=0)
        again.check()
        assert again.latest_seq == cached_blocks.latest_seq + (0 if clean else SEQ_JUMP)
        assert again.oldest_seq == again.latest_seq + 1
        assert (again.key_count, again.digest) == (cached_blocks.key_count, cached_blocks.digest)
        assert {tier: set(again.keys(tier)) for tier in Tier} == {tier: set(cached_blocks.keys(tier)) for tier in Tier}
    assert [path.name for path in file.path.parent.iterdir()] == [file.path.name]


def test_files_of_engines_that_left_are_removed(tmp_path: Path) -> None:
    ids = ["h:8000", "h:8000/0", "h:80001", "[::1]:8000", "[::1]:8000/11", "old:1"]
    files = {name: StateFile(tmp_path, name).path for name in ids}
    other = tmp_path / "other"
    for file in (*files.values(), other):
        file.touch()
    for file in (files["old:1"], other):
        os.utime(file, (0, 1_000.0))
    remove_old_states(tmp_path, 999.0 + OLD_S)
    assert files["old:1"].exists()
    remove_old_states(tmp_path, 1_001.0 + OLD_S)
    assert set(tmp_path.iterdir()) == {*files.values(), other} - {files["old:1"]}
    remove_states(tmp_path, "h:8000")
    remove_states(tmp_path, "[::1]:8000")
    assert set(tmp_path.iterdir()) == {files["h:80001"], other}
    remove_old_states(tmp_path / "none", 0.0)
    remove_states(tmp_path / "none", "h:8000")

"""The connector's workers on an emulated stream, where launching a layer and computing it are apart as on a GPU: layers leave as
they are computed, and KV that is wrong for any reason is noticed by its checksums."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.engines.vllm_questions import Vllm

pytestmark = [pytest.mark.engine, pytest.mark.timeout(200)]

ASK = "import emulated_offload; answer = getattr(emulated_offload, asked.pop('what'))(**asked)"


@pytest.fixture
def ask(vllm: Vllm, model_folder: Path) -> Any:
    """Plays one of emulated_offload's scenes."""
    return lambda what, **more: vllm.ask(ASK, {"what": what, "model_folder": str(model_folder), **more})


def test_each_layer_is_written_before_the_next_one_is_computed(ask: Any) -> None:
    """All layers are launched at once, and the stream computes none before the one before it has arrived."""
    result = ask("layer_by_layer", layers=48, prompts=1, gated=True)
    assert result == {"usable": [True], "equal": [True], "writes": 48, "checked": 1}


def test_prompts_that_are_launched_and_not_computed_keep_no_thread(ask: Any) -> None:
    """The sender has one thread for writes. Were it to wait for layers, the first prompt's would wait for the last one's."""
    result = ask("layer_by_layer", layers=12, prompts=4, gated=True)
    assert result == {"usable": [True] * 4, "equal": [True] * 4, "writes": 48, "checked": 4}


@pytest.mark.parametrize(("sums_s", "checked"), [(30.0, 1), (0.0, 0)])
def test_blocks_that_were_taken_away_while_they_were_read_do_not_count(ask: Any, sums_s: float, checked: int) -> None:
    """Nor do their checksums, neither before the new ones are there nor if they come too late."""
    assert ask("preempted", sums_s=sums_s) == {"early": False, "used": True, "same": True, "checked": checked}


def test_a_prompt_that_is_preempted_when_its_receiver_has_it_keeps_nothing(ask: Any) -> None:
    result = ask("preempted_after_its_end")
    assert result == {"used": True, "same": True, "early": False, "freed": ["p-t"], "kept": 0}


@pytest.mark.parametrize("aborted", [False, True])
def test_blocks_that_a_receiver_releases_are_kept_until_no_write_reads_them(ask: Any, aborted: bool) -> None:
    result = ask("released_while_it_is_written", aborted=aborted)
    assert result == {"early": False, "used": not aborted, "refused": False}


def test_a_receiver_is_told_of_a_timeout_when_no_write_to_it_is_in_progress(ask: Any) -> None:
    assert ask("expires_while_it_is_written") == {"early": False, "used": False}


@pytest.mark.parametrize(("passed_s", "writes"), [(0.0, 1), (1e6, 0)])
def test_a_write_that_waited_for_a_thread_does_not_start_after_its_deadline(
    ask: Any, passed_s: float, writes: int
) -> None:
    assert ask("waits_for_a_thread", passed_s=passed_s) == {"used": bool(writes), "writes": writes}


def test_a_request_that_was_answered_stays_so_when_its_conversation_fails(ask: Any) -> None:
    """vLLM's scheduler ends the engine if it is told a second time that a request was received."""
    assert ask("fails_after_an_answer") == {"told": ["d-a", "d-b"], "invalid": [41]}


@pytest.mark.parametrize("fault", ["none", "late"])
def test_right_kv_passes_the_check(ask: Any, fault: str) -> None:
    assert ask("wrong_kv", fault=fault) == {
        "used": True,
        "same": True,
        "refused": False,
        "checked": 1,
        "wrong": 0,
    }


@pytest.mark.parametrize("fault", ["early", "one name", "reused"])
def test_wrong_kv_is_not_used_whatever_made_it_so(ask: Any, fault: str) -> None:
    result = ask("wrong_kv", fault=fault)
    assert not result["same"], "the fault did nothing"
    assert (result["used"], result["refused"], result["wrong"]) == (False, True, 1)


@pytest.mark.parametrize(("fault", "wrong"), [("none", 0), ("early", 1)])
def test_of_several_workers_the_first_counts_checks_and_each_counts_what_it_finds_wrong(
    ask: Any, fault: str, wrong: int
) -> None:
    result = ask("wrong_kv", fault=fault, rank=1)
    assert (result["checked"], result["wrong"]) == (0, wrong)


def test_a_request_whose_check_raises_an_error_has_failed(ask: Any) -> None:
    """It would wait for ever: its sender's conversation is over."""
    assert ask("repeated_check_fails") == {"used": False, "refused": False}


def test_a_sender_that_cannot_be_reached_is_named_once(ask: Any) -> None:
    (warning,) = ask("senders_out_of_reach", probes=3)
    assert "tcp://p:1" in warning


@pytest.mark.parametrize(("ranks", "idle"), [(1, 1), (2, 0)])
def test_only_an_engine_of_one_rank_sleeps_in_idle_steps(ask: Any, ranks: int, idle: int) -> None:
    """Data-parallel ranks step together: one that sleeps delays all."""
    result = ask("sleeps", data_parallel_size=ranks)
    assert result == {"nothing awaited": 0, "computes": 0, "idle": idle}

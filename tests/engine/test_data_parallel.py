"""A real engine of two data-parallel ranks: each is an instance with its own keys, load and requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.engines.chat_client import assert_agree, chat, complete, fresh_words, open_chat, user
from tests.support.engines.servers import EngineSpec, Rank, running_engines
from tests.support.engines.vllm_questions import Vllm
from tests.support.processes.control_plane import ControlPlane
from tests.support.waiting import WITHIN_S, until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

# What vLLM does with each value of the header at a server of the ranks 2 and 3 of four: the rank that it selects, or "refused".
SECOND_NODE = """
from collections import Counter
from types import SimpleNamespace
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.core_client import DPLBAsyncMPClient
from vllm.v1.engine.input_processor import InputProcessor
class Accepted(Exception):
    pass
class Prompt(dict):
    def __contains__(self, key):
        raise Accepted
parallel = SimpleNamespace(data_parallel_size=4, data_parallel_size_local=2, local_engines_only=True)
config = SimpleNamespace(parallel_config=parallel)
server = SimpleNamespace(vllm_config=config, _validate_params=lambda *of: None, _validate_lora=lambda *of: None)
answer = []
for header in asked:
    try:
        InputProcessor.process_inputs(server, "id", Prompt(), None, (), data_parallel_rank=header)
    except VLLMValidationError:
        answer.append("refused")
    except Accepted:
        engines = [rank.to_bytes(2, "little") for rank in (2, 3)]
        client = SimpleNamespace(core_engines=engines, reqs_in_flight={}, engine_inflight=Counter())
        request = SimpleNamespace(request_id="id", data_parallel_rank=header, pooling_params=None)
        chosen = DPLBAsyncMPClient.get_core_engine_for_request(client, request)
        answer.append(int.from_bytes(chosen, "little"))
"""


@pytest.fixture(scope="module")
def ranks(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Rank]]:
    """The ranks of one server, with event endpoints like those of the Kubernetes templates."""
    folder = tmp_path_factory.mktemp("dp")
    endpoints = {"endpoint": f"ipc://{folder}/tcp-events:1", "replay_endpoint": f"ipc://{folder}/tcp-replay:1"}
    events = {"enable_kv_cache_events": True, "publisher": "zmq", **endpoints}
    flags = ("--data-parallel-size", "2", "--kv-events-config", json.dumps(events))
    # vLLM would bind the threads of both ranks to one core.
    spec = EngineSpec("dp", extra_args=flags, env={"VLLM_CPU_OMP_THREADS_BIND": "nobind"})
    with running_engines([spec], model_folder, folder) as (server,):
        yield [Rank(server, rank) for rank in (0, 1)]


@pytest.fixture(scope="module")
def running_plane(ranks: list[Rank], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane whose agent is given the server's address and the event endpoints of its flags."""
    folder = ranks[0].folder
    options = f"?events=ipc://{folder}/tcp-events:1&replay=ipc://{folder}/tcp-replay:1"
    plane = ControlPlane(ranks, tmp_path_factory.mktemp("dp-plane"), target_of=lambda rank: rank.url + options)
    with plane.running():
        yield plane


def test_a_request_runs_on_the_rank_where_it_is_placed(plane: ControlPlane, ranks: list[Rank]) -> None:
    """The engine's counters of the ranks, and their own event histories, show where a prompt was computed."""
    prompts = [fresh_words(300), fresh_words(400)]
    with plane.client() as client:
        for rank, other, prompt in zip(ranks, reversed(ranks), prompts, strict=True):
            tokens, keys = [rank.tokens() for rank in ranks], other.cached_keys()
            with plane.draining(other):
                answer = complete(client, prompt, max_tokens=20)
            assert answer.instance_id == rank.instance_id
            grown = {rank.rank: rank.tokens() - before for rank, before in zip(ranks, tokens, strict=True)}
            assert grown == {rank.rank: len(prompt.split()) + 20, other.rank: 0}
            plane.wait_settled()
            assert other.cached_keys() == keys
        for rank, prompt in zip(ranks, prompts, strict=True):
            again = complete(client, prompt, max_tokens=1)
            assert again.instance_id == rank.instance_id
            assert_agree(plane, again, (len(prompt.split()) - 1) // 32 * 32)


def test_each_rank_has_its_own_load(plane: ControlPlane, ranks: list[Rank]) -> None:
    def running() -> list[int]:
        found = plane.instances()
        return [found[rank.instance_id].load.running for rank in ranks]

    with plane.client() as client, plane.draining(ranks[0]):
        with open_chat(client, [user(fresh_words(100))], max_tokens=3_500) as answer:
            answer.read(3)
            until(lambda: running() == [0, 1], within_s=WITHIN_S, what="a running request on rank 1")
        until(lambda: running() == [0, 0], within_s=WITHIN_S, what="no running request")
        assert chat(client, [user("hi")], max_tokens=1).instance_id == ranks[1].instance_id


def test_a_server_of_a_hybrid_deployment_counts_its_own_ranks_from_0(vllm: Vllm) -> None:
    """The agent reports this index, and not the rank in the whole deployment (tests/integration/test_agent.py)."""
    assert vllm.ask(SECOND_NODE, [0, 1, 2, 3]) == [2, 3, "refused", "refused"]

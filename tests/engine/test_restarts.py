"""Engines, agents, routers and Redis that go away and come back."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal

import openai
import pytest

from pointsman.router.v1 import fleet_pb2
from tests.support.engines.chat_client import assert_agree, assistant, chat, complete, fresh_words, open_chat, user
from tests.support.engines.servers import Engine
from tests.support.instances import counters
from tests.support.processes.control_plane import ControlPlane, client_of
from tests.support.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]


@pytest.mark.parametrize("how", ["stopped", "killed", "killed, its state lost"])
def test_an_agent_restarts_beside_running_engines(
    plane: ControlPlane, client: openai.OpenAI, engines: list[Engine], how: str
) -> None:
    """Its keys are known again without engine activity, and so are changes that happened while it was away."""
    messages = [user(fresh_words(400))]
    first = chat(client, messages, session=how, max_tokens=50)
    plane.wait_settled()
    incarnations = _incarnations(plane)
    if how == "stopped":
        assert plane.agent.stop() == 0, plane.agent.tail()
    else:
        plane.agent.kill()
    if "lost" in how:
        shutil.rmtree(plane.state_dir)
    else:
        # The small engine evicts old blocks meanwhile.
        for engine in engines:
            with client_of(engine.url) as direct:
                complete(direct, fresh_words(3_000), max_tokens=1)
    work = [engine.metric("vllm:prompt_tokens_total") for engine in engines]
    plane.agent.start()
    plane.wait_settled()
    assert _incarnations(plane) == incarnations
    assert [engine.metric("vllm:prompt_tokens_total") for engine in engines] == work

    messages += [assistant(first.text), user(fresh_words(10))]
    second = chat(client, messages, session=how)
    assert second.instance_id == first.instance_id
    assert_agree(plane, second, 448)


def test_a_router_restarts_beside_agents_gateways_and_open_streams(
    plane: ControlPlane, client: openai.OpenAI, engines: list[Engine]
) -> None:
    """Keys come back from the agents, open streams from the gateway, the session's owner from Redis."""
    messages = [user(fresh_words(400))]
    first = chat(client, messages, session="router-restart", max_tokens=50)
    plane.wait_settled()
    with open_chat(client, [user(fresh_words(100))], max_tokens=3_500) as open_answer:
        open_answer.read(3)
        busy = next(engine for engine in engines if engine.instance_id == open_answer.instance_id)
        with busy.paused():
            plane.router.kill()
            plane.router.start()

            def announced() -> bool:
                status = plane.instances().get(busy.instance_id)
                return status is not None and status.num_requests == 1

            until(announced, within_s=60, what="the open stream announced to the new router")
        open_answer.read(3)
    plane.wait_settled()
    plane.wait_idle()
    messages += [assistant(first.text), user(fresh_words(10))]
    second = chat(client, messages, session="router-restart")
    assert second.instance_id == first.instance_id
    assert_agree(plane, second, 448)


def test_a_killed_gateway_leaves_no_load_behind(plane: ControlPlane, client: openai.OpenAI) -> None:
    """The engine sees the connection end; the router waits for the gateway's lease to end."""
    with open_chat(client, [user(fresh_words(100))], max_tokens=3_500) as cut:
        cut.read(3)
        plane.gateway.kill()
        plane.wait_idle()
        with pytest.raises(openai.APIConnectionError):
            chat(client, [user("hi")], max_tokens=1)
    plane.start_gateway()
    assert chat(client, [user("hi")], max_tokens=1).finish_reason == "length"


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_an_engine_that_ends_is_left_noticed_and_taken_back_empty(
    plane: ControlPlane, client: openai.OpenAI, engines: list[Engine], how: signal.Signals
) -> None:
    """The engine is killed, or told to end with all of its processes, as a service manager does it."""
    messages = [user(fresh_words(400))]
    first = chat(client, messages, session=how.name, max_tokens=50)
    plane.wait_settled()
    victim = next(engine for engine in engines if engine.instance_id == first.instance_id)
    survivor = next(engine for engine in engines if engine is not victim)
    incarnation = plane.instance(victim).instance.incarnation
    assert plane.instance(victim).keys > 0
    messages += [assistant(first.text), user(fresh_words(10))]

    # With a stop string, no engine could go on by its text.
    with open_chat(client, messages, session=how.name, max_tokens=3_000, stop=["no such end"]) as cut:
        assert cut.instance_id == victim.instance_id
        cut.read(3)
        os.killpg(victim.process.pid, how)
        # The client gets an error, instead of half an answer that looks complete.
        with pytest.raises(openai.APIError):
            cut.read_all()
    assert plane.finished_decision(cut.decision_id).outcome == fleet_pb2.DECISION_OUTCOME_FAILED

    # At once, perhaps before the failure is noticed, the session's next turn is answered by the other engine.
    rescued = chat(client, messages, session=how.name)
    assert rescued.instance_id == survivor.instance_id
    until(lambda: _away(plane, victim), within_s=60, what="the dead engine noticed")
    victim.process.stop()

    victim.start()
    victim.wait_ready()

    def reborn() -> bool:
        status = plane.instances().get(victim.instance_id)
        return (
            status is not None
            and status.instance.incarnation != incarnation
            and status.state == fleet_pb2.INSTANCE_STATE_READY
        )

    until(reborn, within_s=60, what="the new incarnation ready")
    assert plane.instance(victim).keys == victim.cached_keys() == 0
    assert not any(counters(plane.instance(victim)).values())
    with plane.draining(survivor):
        # The same prompt that the old incarnation had cached.
        back = chat(client, messages, session=f"again-{how.name}")
        assert back.instance_id == victim.instance_id
        assert_agree(plane, back, 0)
        plane.wait_settled()
        again = chat(client, messages, session=f"again-{how.name}")
    block = victim.spec.block_size
    assert again.usage is not None
    assert_agree(plane, again, (again.usage.prompt_tokens - 1) // block * block)


def test_redis_lost_and_back_is_survived(plane: ControlPlane, client: openai.OpenAI, engines: list[Engine]) -> None:
    """Sessions continue meanwhile, and a stream that is open all the time stays counted until its own end."""
    messages = [user(fresh_words(200))]
    first = chat(client, messages, session="no-redis", max_tokens=20)
    home = next(engine for engine in engines if engine.instance_id == first.instance_id)
    other = next(engine for engine in engines if engine is not home)
    plane.wait_settled()
    with plane.draining(home):
        long = open_chat(client, [user(fresh_words(100))], max_tokens=3_500)
        through = long.__enter__()
    with contextlib.ExitStack() as cleanup:
        cleanup.push(long)
        through.read(3)
        assert through.instance_id == other.instance_id
        with other.paused(), plane.draining(other):
            plane.redis.kill()
            try:
                messages += [assistant(first.text), user(fresh_words(10))]
                without = chat(client, messages, session="no-redis", max_tokens=20)
                assert without.instance_id == first.instance_id
                assert plane.finished_decision(without.decision_id).outcome == fleet_pb2.DECISION_OUTCOME_OK
            finally:
                plane.redis.start()

            def normal() -> bool:
                answer = chat(client, [user(fresh_words(20))], max_tokens=2)
                return not plane.finished_decision(answer.decision_id).degraded

            until(normal, within_s=60, what="a placement that is not degraded")
            assert counters(plane.instance(other))["num_requests"] == 1
            assert plane.decision(through.decision_id).outcome == fleet_pb2.DECISION_OUTCOME_OPEN
        through.read(3)
    plane.wait_idle()
    ended = plane.finished_decision(through.decision_id)
    assert ended.outcome == fleet_pb2.DECISION_OUTCOME_CANCELLED
    assert ended.finished.timings.first_token_ms > 0, "the gateway itself reported the end"


def _away(plane: ControlPlane, engine: Engine) -> bool:
    status = plane.instances().get(engine.instance_id)
    return status is None or status.state == fleet_pb2.INSTANCE_STATE_UNHEALTHY


def _incarnations(plane: ControlPlane) -> dict[str, str]:
    return {instance_id: status.instance.incarnation for instance_id, status in plane.instances().items()}

"""A real engine that sleeps, is paused, has its cache reset, and loses an adapter: it gets no request that it cannot answer,
and what it has dropped does not count as cached. A CPU engine sleeps as others do, except that its worker keeps its memory."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import openai
import pytest

from pointsman.router.v1 import fleet_pb2
from tests.support.engines.chat_client import assert_agree, chat, complete, fresh_words, user
from tests.support.engines.servers import ADAPTER, Engine
from tests.support.processes.control_plane import ControlPlane
from tests.support.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

SEEN_WITHIN_S = 20.0


def tell(engine: Engine, path: str, body: object = None) -> None:
    """POST to the engine itself. Raises urllib.error.HTTPError unless it succeeds."""
    data = json.dumps(body).encode() if body is not None else b""
    request = urllib.request.Request(f"{engine.url}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        answer.read()


def wait_until_ready(plane: ControlPlane, engine: Engine) -> None:
    ready = fleet_pb2.INSTANCE_STATE_READY
    until(lambda: plane.instance(engine).state == ready, within_s=SEEN_WITHIN_S, what=f"{engine.instance_id} ready")


@pytest.mark.parametrize(
    ("suspend", "reason", "resume"),
    [
        ("/sleep?level=1", "asleep (level 1", "/wake_up"),
        ("/sleep?level=2", "asleep (level 2", "/wake_up"),
        ("/pause", "paused", "/resume"),
    ],
)
def test_a_suspended_engine_gets_nothing_and_has_nothing_cached(
    plane: ControlPlane, client: openai.OpenAI, engines: list[Engine], suspend: str, reason: str, resume: str
) -> None:
    other, engine = engines
    messages = [user(fresh_words(400))]
    with plane.draining(other):
        first = chat(client, messages, session=suspend)
    assert first.instance_id == engine.instance_id
    plane.wait_settled()
    assert plane.instance(engine).keys > 0
    tell(engine, suspend)
    try:
        # It may be seen while it falls asleep.
        until(
            lambda: plane.instance(engine).load.suspended.startswith(reason),
            within_s=SEEN_WITHIN_S,
            what=f"an engine that is {reason}",
        )
        assert plane.instance(engine).state == fleet_pb2.INSTANCE_STATE_SUSPENDED
        until(lambda: plane.instance(engine).keys == 0, within_s=SEEN_WITHIN_S, what="no keys")
        away = chat(client, messages, session=suspend)
        assert away.instance_id == other.instance_id
    finally:
        tell(engine, resume)
    wait_until_ready(plane, engine)
    with plane.draining(other):
        again = chat(client, messages, session=f"{suspend} again")
    assert again.instance_id == engine.instance_id
    assert_agree(plane, again, 0)
    plane.wait_settled()


def test_a_sleep_that_keeps_the_cache_keeps_the_keys(
    plane: ControlPlane, client: openai.OpenAI, engines: list[Engine]
) -> None:
    other, engine = engines
    messages = [user(fresh_words(400))]
    with plane.draining(other):
        chat(client, messages, session="level 0")
    plane.wait_settled()
    keys = plane.instance(engine).keys
    tell(engine, "/sleep?level=0")
    try:
        # It is paused before it says that it is asleep.
        until(
            lambda: plane.instance(engine).load.suspended == "asleep (its scheduler is paused)",
            within_s=SEEN_WITHIN_S,
            what="an engine that is asleep",
        )
    finally:
        tell(engine, "/wake_up?tags=scheduling")
    wait_until_ready(plane, engine)
    assert plane.instance(engine).keys == keys
    with plane.draining(other):
        again = chat(client, messages, session="level 0 again")
    assert again.cached_tokens
    assert_agree(plane, again, again.cached_tokens)


def test_a_reset_counts_from_the_next_step_on(
    plane: ControlPlane, client: openai.OpenAI, engines: list[Engine]
) -> None:
    """vLLM tells of the reset with the next step."""
    other, engine = engines
    messages = [user(fresh_words(400))]
    with plane.draining(other):
        chat(client, messages)
        tell(engine, "/reset_prefix_cache")
        chat(client, [user(fresh_words(40))])
        until(
            lambda: plane.instance(engine).keys == engine.cached_keys(),
            within_s=SEEN_WITHIN_S,
            what="the keys that it has",
        )
        again = chat(client, messages)
    assert_agree(plane, again, 0)


def test_an_unloaded_adapter_is_not_asked_of_its_engine(
    plane: ControlPlane, client: openai.OpenAI, engines: list[Engine], model_folder: Path
) -> None:
    other, engine = engines

    def names(engine: Engine) -> list[str]:
        return list(plane.instance(engine).instance.lora_names)

    assert names(engine) == names(other) == [ADAPTER]
    with plane.draining(other):
        assert complete(client, fresh_words(40), max_tokens=1, model=ADAPTER).instance_id == engine.instance_id
    tell(engine, "/v1/unload_lora_adapter", {"lora_name": ADAPTER})
    try:
        until(lambda: names(engine) == [], within_s=SEEN_WITHIN_S, what="that the adapter is gone")
        for _ in range(3):
            answer = complete(client, fresh_words(40), max_tokens=1, model=ADAPTER)
            assert answer.instance_id == other.instance_id
    finally:
        path = str(model_folder / "adapter")
        tell(engine, "/v1/load_lora_adapter", {"lora_name": ADAPTER, "lora_path": path})
    until(lambda: names(engine) == [ADAPTER], within_s=SEEN_WITHIN_S, what="that the adapter is back")

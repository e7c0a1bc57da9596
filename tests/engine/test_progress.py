"""What the router knows of an engine's work before the answer comes, and of its cache before events tell."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from tests.support.engines.chat_client import assistant, chat, complete, fresh_words, prompt_tokens, user
from tests.support.engines.servers import Engine
from tests.support.instances import counters
from tests.support.processes.control_plane import ControlPlane
from tests.support.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


def test_pending_prefill_falls_while_a_long_prompt_is_computed(
    plane: ControlPlane, client: openai.OpenAI, engines: list[Engine]
) -> None:
    """The engine takes 4,000 tokens in two chunks, 2,048 being its default: the first is known before the first token."""
    length = 4_000
    seen: list[dict[str, int]] = []
    for _ in range(3):  # A busy machine may show an agent's delta too late; it will not do so every time.
        with plane.draining(engines[1]), ThreadPoolExecutor(1) as other:
            answer = other.submit(complete, client, fresh_words(length), max_tokens=1)
            while not answer.done():
                seen.append(counters(plane.instance(engines[0])))
            assert prompt_tokens(answer.result()) == length
        plane.wait_idle()
    assert any(load["pending_prefill_tokens"] == length for load in seen), seen
    assert any(
        0 < load["pending_prefill_tokens"] < length and load["num_requests"] == 1 and load["ongoing_decode_tokens"] == 0
        for load in seen
    ), sorted({tuple(load.items()) for load in seen})


def test_the_next_turn_at_once_is_placed_by_what_the_last_one_computed(
    plane: ControlPlane, client: openai.OpenAI, engines: list[Engine]
) -> None:
    """Without a wait for events in between. The prediction is never more than what the engine finds."""
    with plane.draining(engines[1]):
        messages = [user(fresh_words(300))]
        computed = 0
        for _ in range(6):
            answer = chat(client, messages, session="at-once", max_tokens=2)
            decision = plane.decision(answer.decision_id)
            assert decision.cached_tokens >= computed // 32 * 32
            assert answer.cached_tokens >= decision.cached_tokens
            computed = prompt_tokens(answer)
            messages += [assistant(answer.text), user(fresh_words(70))]
    until(lambda: plane.instance(engines[0]).provisional_keys == 0, within_s=60, what="no provisional keys left")

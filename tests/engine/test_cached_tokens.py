"""The cached tokens that the router predicts are those that the engine finds, token for token."""

from __future__ import annotations

import openai
import pytest

from pointsman.router.v1 import fleet_pb2
from tests.support.engines.chat_client import (
    MESSAGE_END,
    ONE_MESSAGE,
    assert_agree,
    assistant,
    chat,
    complete,
    fresh_words,
    open_chat,
    prompt_tokens,
    user,
)
from tests.support.engines.servers import Engine
from tests.support.processes.control_plane import ControlPlane, client_of

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

# Prompt tokens of turn 1, tokens of its answer, prompt tokens of turn 2. Blocks have 32 and 64 tokens.
TURNS = {
    "less than a block": (30, 1, 50),
    "one block and a bit": (70, 10, 100),
    "turn 1 ends with a block": (128, 40, 200),
    "the answer fills a block, but its last token was not computed": (200, 56, 300),
    "the answer's computed tokens end with a block": (200, 57, 300),
    "turn 2 ends with a block": (308, 20, 384),
    "long": (2_000, 150, 2_500),
}


@pytest.mark.parametrize("on", [0, 1], ids=["on-32", "on-64"])
@pytest.mark.parametrize(("prompt", "generated", "next_prompt"), TURNS.values(), ids=TURNS.keys())
def test_turn_two_is_placed_and_counted_by_what_turn_one_left(
    plane: ControlPlane,
    client: openai.OpenAI,
    engines: list[Engine],
    prompt: int,
    generated: int,
    next_prompt: int,
    on: int,
) -> None:
    session = f"turns-{prompt}-{generated}-{on}"
    messages = [user(fresh_words(prompt - ONE_MESSAGE))]
    with plane.draining(engines[1 - on]):
        first = chat(client, messages, session=session, max_tokens=generated)
    assert prompt_tokens(first) == prompt
    plane.wait_settled()

    more = next_prompt - prompt - generated - MESSAGE_END - ONE_MESSAGE
    messages += [assistant(first.text), user(fresh_words(more))]
    second = chat(client, messages, session=session)
    assert prompt_tokens(second) == next_prompt

    block = engines[on].spec.block_size
    computed = prompt + generated - 1
    expected = min(computed, next_prompt - 1) // block * block
    if expected:
        assert second.instance_id == first.instance_id
    assert_agree(plane, second, expected if second.instance_id == first.instance_id else 0)


@pytest.mark.parametrize("on", [0, 1], ids=["on-32", "on-64"])
@pytest.mark.parametrize("length", [127, 128, 129])
def test_a_repeated_prompt_is_computed_from_its_last_token_at_least(
    plane: ControlPlane, client: openai.OpenAI, engines: list[Engine], length: int, on: int
) -> None:
    """Sent three times, because the second and third answer make the engine store the last block of a whole prompt again."""
    text = fresh_words(length)
    with plane.draining(engines[1 - on]):
        complete(client, text, max_tokens=1)
    block = engines[on].spec.block_size
    for _ in range(3):
        plane.wait_settled()
        again = complete(client, text, max_tokens=1)
        assert again.instance_id == engines[on].instance_id
        assert_agree(plane, again, (length - 1) // block * block)


def test_a_session_without_an_id_is_known_by_its_prompt(plane: ControlPlane, client: openai.OpenAI) -> None:
    messages = [user(fresh_words(300))]
    first = chat(client, messages, max_tokens=40)
    plane.wait_settled()
    messages += [assistant(first.text), user(fresh_words(10))]
    second = chat(client, messages)
    assert second.instance_id == first.instance_id
    assert_agree(plane, second, 320)
    session = plane.decision(first.decision_id).session_id
    assert session
    assert plane.decision(second.decision_id).session_id == session


def test_another_session_with_the_same_system_prompt_profits(
    plane: ControlPlane, client: openai.OpenAI, engines: list[Engine]
) -> None:
    system = {"role": "system", "content": fresh_words(1_021)}
    first = chat(client, [system, user(fresh_words(30))], session="shared-1")
    plane.wait_settled()
    second = chat(client, [system, user(fresh_words(30))], session="shared-2")
    assert second.instance_id == first.instance_id
    assert_agree(plane, second, 1_024)


def test_both_instances_hold_a_prefix_and_each_is_counted_by_its_own_blocks(
    plane: ControlPlane, client: openai.OpenAI, engines: list[Engine]
) -> None:
    """Keys compare across block sizes: the same 100 tokens are 96 on one instance and 64 on the other."""
    text = fresh_words(100)
    for engine in engines:
        with client_of(engine.url) as direct:
            complete(direct, text, max_tokens=1)
    plane.wait_settled()
    answer = complete(client, text + fresh_words(20), max_tokens=1)
    candidates = plane.decision(answer.decision_id).candidates
    assert {candidate.instance_id: candidate.cached_tokens for candidate in candidates} == {
        engines[0].instance_id: 96,
        engines[1].instance_id: 64,
    }
    assert all(candidate.exact for candidate in candidates)
    assert answer.instance_id == engines[0].instance_id
    assert_agree(plane, answer, 96)


def test_evicted_blocks_are_forgotten(plane: ControlPlane, client: openai.OpenAI, engines: list[Engine]) -> None:
    """The smaller engine holds 8,192 tokens; 12,000 others push a prompt out of it."""
    small = engines[1]
    with plane.draining(engines[0]):
        text = fresh_words(1_000)
        complete(client, text, max_tokens=1)
        plane.wait_settled()
        assert_agree(plane, complete(client, text, max_tokens=1), 960)
        with client_of(small.url) as direct:
            for _ in range(4):
                complete(direct, fresh_words(3_000), max_tokens=1)
        plane.wait_settled()
        assert plane.instance(small).keys <= 8_192 // 16
        assert_agree(plane, complete(client, text, max_tokens=1), 0)


def test_sessions_side_by_side_keep_their_instances_and_counts(plane: ControlPlane, client: openai.OpenAI) -> None:
    """Two sessions of four turns, always both at once."""
    dialogues = {"side-1": [user(fresh_words(200))], "side-2": [user(fresh_words(200))]}
    homes: dict[str, str] = {}
    with_usage = {"stream_options": {"include_usage": True}}
    for turn in range(4):
        known = {}
        # The first answers are so long that both streams are open at once, and the sessions get different instances.
        tokens = 40 if turn else 400
        with (
            open_chat(client, dialogues["side-1"], session="side-1", max_tokens=tokens, **with_usage) as one,
            open_chat(client, dialogues["side-2"], session="side-2", max_tokens=tokens, **with_usage) as two,
        ):
            for session, answer in (("side-1", one), ("side-2", two)):
                dialogues[session] += [assistant(answer.read_all()), user(fresh_words(30))]
                assert homes.setdefault(session, answer.instance_id) == answer.instance_id
                known[session] = answer.decision_id
        for decision_id in known.values():
            decision = plane.finished_decision(decision_id)
            assert decision.outcome == fleet_pb2.DECISION_OUTCOME_OK
            assert decision.cached_tokens == decision.finished.cached_tokens
            assert (decision.cached_tokens > 0) == (turn > 0)
        plane.wait_settled()
    assert len(set(homes.values())) == 2

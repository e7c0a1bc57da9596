"""A request with several answers (`n`) or prompts counts as what the engine runs and computes."""

from __future__ import annotations

import openai
import pytest

from tests.support.engines.chat_client import fresh_words
from tests.support.engines.servers import SERVED_NAME, Engine
from tests.support.processes.control_plane import ControlPlane
from tests.support.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

COMPUTED = "vllm:prompt_tokens_by_source_total"


def computed(engines: list[Engine]) -> float:
    return sum(engine.metric(COMPUTED, source="local_compute") for engine in engines)


def test_several_answers_run_as_many_sequences_and_compute_the_prompt_once(
    plane: ControlPlane, client: openai.OpenAI, engines: list[Engine]
) -> None:
    prompt, before = fresh_words(600), computed(engines)
    stream = client.completions.with_raw_response.create(
        model=SERVED_NAME,
        prompt=prompt,
        n=4,
        temperature=1.0,
        max_tokens=400,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    chunks = stream.parse()
    seen = set[int]()
    while len(seen) < 4:
        seen |= {choice.index for choice in next(chunks).choices}
    [here] = [engine for engine in engines if engine.instance_id == stream.headers["X-Pointsman-Instance"]]
    until(lambda: here.running() == 4, within_s=10, what="the engine runs each of the answers as a request")
    status = plane.instance(here)
    assert status.num_requests == 4
    assert (status.ongoing_tokens, status.ongoing_decode_tokens) == (600, 2400)
    for _ in chunks:
        pass
    decision = plane.finished_decision(stream.headers["X-Pointsman-Decision"])
    assert (decision.input_tokens, decision.finished.output_tokens) == (600, 1600)
    assert not decision.finished.HasField("cached_tokens")
    # Each sequence computes what comes after the prompt's last whole block, and at least its last token.
    block = here.spec.block_size
    assert computed(engines) - before == 600 + 3 * (600 - 599 // block * block)


def test_several_prompts_compute_once_what_they_begin_with(
    plane: ControlPlane, client: openai.OpenAI, engines: list[Engine]
) -> None:
    before, common = computed(engines), fresh_words(512)
    prompts = [f"{common} {fresh_words(40)}" for _ in range(4)]
    raw = client.completions.with_raw_response.create(
        model=SERVED_NAME, prompt=prompts, temperature=0, max_tokens=1, stream=False
    )
    usage = raw.parse().usage
    assert usage is not None
    decision = plane.finished_decision(raw.headers["X-Pointsman-Decision"])
    assert decision.finished.prompt_tokens == usage.prompt_tokens > 4 * 550
    assert decision.input_tokens == computed(engines) - before == usage.prompt_tokens - 3 * 512


def test_an_engines_own_maximum_of_prompts_is_told(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="exceeds the maximum allowed count of 1024"):
        client.completions.create(model=SERVED_NAME, prompt=["a"] * 1025, max_tokens=1)

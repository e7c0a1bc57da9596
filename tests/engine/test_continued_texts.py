"""Streams of engines without the connector package outlive a broken connection by their text."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.engines.chat_client import user
from tests.support.engines.cut_connections import linked
from tests.support.engines.servers import SERVED_NAME, Engine
from tests.support.processes.control_plane import ControlPlane

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

TOKENS, CUTS = 80, 12


def test_a_chat_goes_on_with_its_text_or_ends_with_an_error(engines: list[Engine], tmp_path: Path) -> None:
    """The rest is what the engine makes of prompt and text. A random model's tokens are often not those of their text."""
    rng = random.Random(5)
    whole = 0
    with linked(engines) as there, ControlPlane(there, tmp_path).running() as plane:  # type: ignore[arg-type]
        for number in range(CUTS):
            asked: Any = {"messages": [user(f"{number} one two three")], "max_tokens": TOKENS, "temperature": 0}
            texts, ids, roles, usage, cut = [""], set[str](), 0, None, rng.randrange(2, TOKENS // 2)
            with plane.client() as client:
                raw = client.chat.completions.with_raw_response.create(
                    model=SERVED_NAME, stream=True, stream_options={"include_usage": True}, **asked
                )
                instance = raw.headers["x-pointsman-instance"]
                engine = next(engine for engine in there if engine.instance_id == instance)
                try:
                    for at, chunk in enumerate(raw.parse()):
                        if at == cut:
                            engine.cut()
                        ids.add(chunk.id)
                        usage = chunk.usage or usage
                        for choice in chunk.choices:
                            roles += bool(choice.delta.role)
                            texts.append(choice.delta.content or "")
                except openai.APIError:
                    continue
            whole += 1
            assert (len(ids), roles) == (1, 1)
            assert usage is not None
            alone = client_usage(plane, asked)
            assert usage.prompt_tokens == alone
            assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
            assert abs(usage.completion_tokens - TOKENS) <= TOKENS // 4
        plane.wait_idle()
    assert whole


def client_usage(plane: ControlPlane, asked: dict[str, Any]) -> int:
    """The prompt's tokens as an engine counts them."""
    with plane.client() as client:
        answer = client.chat.completions.create(model=SERVED_NAME, **(asked | {"max_tokens": 1}))
    assert answer.usage is not None
    return int(answer.usage.prompt_tokens)

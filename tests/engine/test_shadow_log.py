"""A shadow's results from a log are what real engines did: the same tokens, and the same number of them cached."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from pointsman_shadow.io.read_command import LogReader
from pointsman_shadow.io.settings import ReadSettings
from tests.support.engines.chat_client import assistant, fresh_words, user
from tests.support.engines.servers import SERVED_NAME, Engine

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

SESSIONS, TURNS = 3, 4


async def test_a_log_of_requests_that_another_router_dealt(
    engines: list[Engine], model_folder: Path, tmp_path: Path
) -> None:
    talks = [[user(fresh_words(200 + 40 * number))] for number in range(SESSIONS)]
    lines, turn = [], 0
    for _ in range(TURNS):
        for messages in talks:
            # Two requests in a row for each engine: half of the turns find their previous turn.
            engine = engines[turn // 2 % 2]
            turn += 1
            body: dict[str, Any] = {"model": SERVED_NAME, "messages": messages, "max_tokens": 24, "temperature": 0}
            began = time.time()
            answer = engine.ask("/v1/chat/completions", body).json()
            lines.append(
                {"time": time.time(), "duration_s": time.time() - began, "path": "/v1/chat/completions", "body": body,
                 "status": 200, "upstream": engine.url, "usage": answer["usage"]}
            )  # fmt: skip
            messages = [*messages, assistant(answer["choices"][0]["message"]["content"]), user(fresh_words(60))]
            talks[talks.index(body["messages"])] = messages
    (tmp_path / "log").write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = ReadSettings(
        log=tmp_path / "log",
        tokenizers=[f"{SERVED_NAME}={model_folder}"],
        kv_capacity_tokens=8_192,
        compared=tmp_path / "compared",
    )
    reader = LogReader(settings)
    await reader.run()

    found = reader.comparison.summaries()[SERVED_NAME]
    assert (found["requests"], found["keyed"], found["placement_known"], found["output_known"]) == (turn,) * 4
    assert found["prompt_tokens"] == sum(line["usage"]["prompt_tokens"] for line in lines)
    assert found["counterfactual"]["cached_tokens"] > found["recorded"]["cached_tokens"]
    compared = sorted(
        map(json.loads, (tmp_path / "compared").read_text().splitlines()), key=lambda comparison: comparison["at"]
    )
    assert sum(comparison["engine_said_cached_tokens"] for comparison in compared) > 0
    for comparison in compared:
        (engine,) = [each for each in engines if each.url.endswith(comparison["instance"])]
        # Engines find whole blocks of their own size, 32 and 64 tokens; the model's blocks have 16.
        modelled = comparison["recorded"]["cached_tokens"]
        assert abs(modelled - comparison["engine_said_cached_tokens"]) <= engine.spec.block_size, comparison

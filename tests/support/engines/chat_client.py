"""Short ways to talk through the official client and keep what tests look at, the placement's headers included."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import openai
from openai.types.chat import ChatCompletionChunk
from openai.types.completion_usage import CompletionUsage

from pointsman.router.v1 import fleet_pb2
from tests.support.engines.model import words
from tests.support.engines.servers import SERVED_NAME
from tests.support.processes.control_plane import ControlPlane

Message = dict[str, Any]

# Tokens that the chat template adds: "<|im_start|>user\n" before a message, "<|im_end|>\n" after it, and the assistant's head.
MESSAGE_HEAD, MESSAGE_END, ANSWER_HEAD = 3, 2, 3
ONE_MESSAGE = MESSAGE_HEAD + MESSAGE_END + ANSWER_HEAD

_seeds = count(1_000)


@dataclass(frozen=True)
class Answer:
    """An answer and where it came from. `decision_id` and `instance_id` are empty when the engine was asked directly."""

    text: str
    finish_reason: str | None
    usage: CompletionUsage | None
    decision_id: str
    instance_id: str

    @property
    def cached_tokens(self) -> int:
        """Cached prompt tokens as the engine counted them."""
        assert self.usage is not None
        assert self.usage.prompt_tokens_details is not None
        return self.usage.prompt_tokens_details.cached_tokens or 0


def fresh_words(number: int) -> str:
    """A text of `number` tokens that no earlier prompt of this session began with."""
    return words(number, next(_seeds))


def user(text: str | list[Any]) -> Message:
    """A user's message."""
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    """An earlier answer, sent back."""
    return {"role": "assistant", "content": text}


def chat(
    client: openai.OpenAI, messages: list[Message], *, session: str = "", max_tokens: int = 16, **more: Any
) -> Answer:
    """One chat request without streaming, greedy."""
    raw = client.chat.completions.with_raw_response.create(
        **_chat_arguments(messages, session, max_tokens, more), stream=False
    )
    answer = raw.parse()
    return Answer(
        text=answer.choices[0].message.content or "",
        finish_reason=answer.choices[0].finish_reason,
        usage=answer.usage,
        decision_id=raw.headers.get("X-Pointsman-Decision", ""),
        instance_id=raw.headers.get("X-Pointsman-Instance", ""),
    )


def complete(
    client: openai.OpenAI, prompt: str | list[int], *, model: str = SERVED_NAME, max_tokens: int = 16, **more: Any
) -> Answer:
    """One text completion without streaming, greedy."""
    raw = client.completions.with_raw_response.create(
        model=model, prompt=prompt, max_tokens=max_tokens, temperature=0, stream=False, **more
    )
    answer = raw.parse()
    return Answer(
        text=answer.choices[0].text,
        finish_reason=answer.choices[0].finish_reason,
        usage=answer.usage,
        decision_id=raw.headers.get("X-Pointsman-Decision", ""),
        instance_id=raw.headers.get("X-Pointsman-Instance", ""),
    )


def assert_agree(plane: ControlPlane, answer: Answer, expected: int) -> None:
    """Router, engine, and what the gateway told the router afterwards all say `expected` cached tokens."""
    decision = plane.finished_decision(answer.decision_id)
    assert {
        "router": decision.cached_tokens,
        "engine": answer.cached_tokens,
        "reported": decision.finished.cached_tokens,
    } == {"router": expected, "engine": expected, "reported": expected}
    assert decision.input_tokens == decision.finished.prompt_tokens == prompt_tokens(answer)
    assert decision.outcome == fleet_pb2.DECISION_OUTCOME_OK


def prompt_tokens(answer: Answer) -> int:
    """The prompt's tokens as the engine counted them."""
    assert answer.usage is not None
    return answer.usage.prompt_tokens


@dataclass(frozen=True)
class OpenAnswer:
    """A streamed answer that is still coming."""

    chunks: Iterator[ChatCompletionChunk]
    decision_id: str
    instance_id: str

    def read(self, tokens: int) -> str:
        """The text that comes next, of `tokens` tokens at least: an engine may put several into one chunk."""
        text = ""
        while len(text.split()) < tokens:
            text += _text_of(next(self.chunks))
        return text

    def read_all(self) -> str:
        """The text that is still to come. openai.APIError when the stream ends with an error."""
        return "".join(map(_text_of, self.chunks))


@contextmanager
def open_chat(
    client: openai.OpenAI, messages: list[Message], *, session: str = "", max_tokens: int = 16, **more: Any
) -> Iterator[OpenAnswer]:
    """A streamed chat request, greedy; leaving the block closes the connection, as a client that goes away does."""
    raw = client.chat.completions.with_raw_response.create(
        **_chat_arguments(messages, session, max_tokens, more), stream=True
    )
    with raw.parse() as stream:
        yield OpenAnswer(
            chunks=iter(stream),
            decision_id=raw.headers.get("X-Pointsman-Decision", ""),
            instance_id=raw.headers.get("X-Pointsman-Instance", ""),
        )


def _text_of(chunk: ChatCompletionChunk) -> str:
    return (chunk.choices[0].delta.content or "") if chunk.choices else ""


def _chat_arguments(messages: list[Message], session: str, max_tokens: int, more: dict[str, Any]) -> dict[str, Any]:
    headers = {"X-Session-ID": session} if session else {}
    return {
        "model": SERVED_NAME,
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": 0,
        "extra_headers": headers,
        **more,
    }

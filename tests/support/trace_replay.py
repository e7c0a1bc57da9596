"""Endless clients that replay a small trace against a gateway and check each answer against the expected one."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import aiohttp

from pointsman_lab.engine.prompt_content import TokenContent
from pointsman_lab.workload.chat_maker import ChatMaker, Message
from pointsman_lab.workload.synthetic_trace import SMALL, generate
from pointsman_lab.workload.tokenizer import ChatTokenizer
from pointsman_lab.workload.traces import TraceRequest, by_session

# Timeout of one request, s.
DEADLINE_S = 30.0
# Timeout for a few whole answers of a healthy fleet, s.
ANSWERS_S = 60.0
TRACE = generate(120, 60.0, 5, replace(SMALL, output_tokens=400))
# Statuses after which clients may retry: the request was not accepted, or an instance failed.
PROPER_ERRORS = {429, 502, 503}


@dataclass
class ClientRequest:
    """One request with a unique id, and its outcome for the client.

    "whole"; "broken": an answer that began, and ended with an error event or a broken connection; "reset": the connection ended
    without an answer, and the client retries with another id; or an error's status. "hung" and "wrong" must not occur.
    """

    request_id: str
    sent_at: float
    ended_at: float = 0.0
    outcome: str = "hung"
    detail: str = ""


class CheckedLoad:
    """The clients, whose prompts consist of `words`. `asked` lists the requests since begin(). `known`: the answers are known
    in advance, as those of emulated engines are; otherwise only their lengths are."""

    def __init__(
        self, url: str, model: str, words: Sequence[str], *, scale: float, clients: int, known: bool = True
    ) -> None:
        self.asked: list[ClientRequest] = []
        self.prompts: dict[str, list[int]] = {}
        """Session -> tokens of its newest prompt, if answers are known."""
        self._url, self._model, self._count, self._known = url, model, clients, known
        self._tokenizer = ChatTokenizer()
        self._texts = dict(zip(self._tokenizer.word_ids, self._tokenizer.words, strict=True))
        self._chats = ChatMaker(TRACE, words, scale)
        self._sessions: Iterator[list[TraceRequest]] = itertools.cycle(by_session(TRACE).values())
        self._numbers = itertools.count()
        self._going = False
        self._clients: list[asyncio.Task[None]] = []

    def begin(self) -> None:
        """Start the clients."""
        self.asked.clear()
        self._going = True
        self._clients = [asyncio.create_task(self._client()) for _ in range(self._count)]

    async def end(self) -> None:
        """Stop sending requests, and wait for the last answers."""
        self._going = False
        await asyncio.gather(*self._clients)

    async def answers(self, count: int) -> None:
        """Wait until `count` more requests have whole answers."""
        wanted = self.counts()["whole"] + count
        # An own deadline: pytest's timeout, if it is raised in a callback of the event loop, ends nothing.
        deadline = time.monotonic() + ANSWERS_S
        while self.counts()["whole"] < wanted:
            assert time.monotonic() < deadline, f"no {count} answers in {ANSWERS_S:g} s: {self.counts()}"
            await asyncio.sleep(0.02)

    def counts(self) -> Counter[str]:
        """Return how often each outcome has occurred."""
        return Counter(request.outcome for request in self.asked if request.ended_at)

    def failures(self) -> list[ClientRequest]:
        """Return the requests without a whole answer."""
        return [request for request in self.asked if request.outcome != "whole"]

    async def _client(self) -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE_S)) as http:
            while self._going:
                for turn in next(self._sessions):
                    if not self._going:
                        return
                    await self._turn(http, turn)

    async def _turn(self, http: aiohttp.ClientSession, turn: TraceRequest) -> None:
        messages = self._chats.messages(turn)
        length = self._chats.tokens(turn.output_length)
        number = next(self._numbers)
        wanted = await asyncio.to_thread(self._answer_to, turn.session, messages, length) if self._known else None
        body = {
            "model": self._model,
            "messages": messages,
            "max_tokens": length,
            "ignore_eos": True,
            "stream": number % 4 > 0,
            "stream_options": {"include_usage": True},
        }
        for again in itertools.count():
            request = ClientRequest(f"q{number}.{again}", time.monotonic())
            self.asked.append(request)
            headers = {"X-Request-ID": request.request_id, "X-Session-ID": turn.session}
            await self._ask(http, request, body if body["stream"] else _whole(body), headers, wanted)
            request.ended_at = time.monotonic()
            if request.outcome != "reset":
                break
            await asyncio.sleep(0.1)

    def _answer_to(self, session: str, messages: list[Message], length: int) -> str:
        prompt = self._tokenizer.encode(self._tokenizer.render(messages))
        self.prompts[session] = prompt
        content = TokenContent(prompt, 0, 16, self._tokenizer.word_ids, 0)
        return "".join(self._texts[content.append()] for _ in range(length))

    async def _ask(
        self,
        http: aiohttp.ClientSession,
        request: ClientRequest,
        body: dict[str, Any],
        headers: dict[str, str],
        wanted: str | None,
    ) -> None:
        status = 0
        try:
            async with http.post(f"{self._url}/v1/chat/completions", json=body, headers=headers) as answer:
                status = answer.status
                text = (await answer.read()).decode()
        except TimeoutError:
            return
        except (aiohttp.ClientError, OSError) as error:
            request.outcome, request.detail = "broken" if status else "reset", repr(error)
            return
        if status in PROPER_ERRORS:
            request.outcome, request.detail = str(status), json.loads(text)["error"]["message"]
        elif status != 200:
            request.outcome, request.detail = "wrong", f"{status}: {text}"
        else:
            received = json.loads(text) if not body["stream"] else text
            request.outcome, request.detail = _read(received, body["max_tokens"], wanted)


def _whole(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name != "stream_options"}


def _read(answer: Any, length: int, wanted: str | None) -> tuple[str, str]:
    """Return outcome and detail of an answer that ended. An error event reports a stream's failure, with or without [DONE]."""
    if not isinstance(answer, str):
        choice = answer["choices"][0]
        said, reasons, usages, ends = choice["message"]["content"], [choice["finish_reason"]], [answer["usage"]], True
    else:
        events = [event.removeprefix("data: ") for event in answer.split("\n\n") if event]
        chunks = [json.loads(event) for event in events if event != "[DONE]"]
        if errors := [chunk["error"]["message"] for chunk in chunks if "error" in chunk]:
            return "broken", errors[0]
        choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
        said = "".join(choice["delta"].get("content") or "" for choice in choices)
        reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
        usages = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
        ends = events.count("[DONE]") == 1 and events[-1] == "[DONE]"
    lengths = [usage["completion_tokens"] for usage in usages]
    right = ends and reasons == ["length"] and lengths == [length] and wanted in (None, said)
    return ("whole", "") if right else ("wrong", f"{reasons} {lengths} {said!r}, not {wanted!r}")

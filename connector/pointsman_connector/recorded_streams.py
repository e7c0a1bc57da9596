"""Tells the token ids of a stream's events beside them, and leaves out what the client has of a continued answer.

The functions `telling...` wrap the generators of streams of vLLM's API server; answer_continuation.py puts them in place.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import itertools
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

from pointsman_connector.answer_record import CONTINUED, asked, comment, read

# Attributes of a RequestOutput: the client has it; no other engine could continue its answer.
REPLAYED, UNRECORDED = "pointsman_replayed", "pointsman_unrecorded"


def generation_error() -> type[Exception]:
    """Return vLLM's class of errors in the place of an answer's end. Raises ImportError if it has none."""
    try:
        from vllm.exceptions import GenerationError
    except ImportError:
        from vllm.entrypoints.openai.engine.protocol import GenerationError  # vLLM 0.22, 0.26
    kind: type[Exception] = GenerationError
    return kind


class _Outputs:
    """Passes on the engine's outputs to a stream's generator, and keeps their ids until a comment tells them."""

    def __init__(self, results: AsyncIterator[Any]) -> None:
        self._results = results
        self._pieces: list[list[int]] = []
        self._complete = False
        self.replayed = False  # whether the client has what the generator makes of the last output
        self.ended = False
        self.unrecorded = False  # whether no other engine could continue the answer

    async def passed_on(self) -> AsyncIterator[Any]:
        """Yield the outputs. Raises GenerationError if the engine aborts."""
        async for result in self._results:
            # Completions have (number of the prompt, output), Responses a context with the output.
            output = result[1] if isinstance(result, tuple) else getattr(result, "last_output", result)
            self.replayed = getattr(output, REPLAYED, False)
            if any(completion.finish_reason in ("abort", "error") for completion in output.outputs):
                # Not the answer's end: an error event follows, in the place of which another engine goes on.
                raise generation_error()("the engine has ended the answer")
            self.unrecorded = getattr(output, UNRECORDED, False)
            if not self.replayed and not self.unrecorded:
                self._pieces += [list(completion.token_ids) for completion in output.outputs if completion.token_ids]
                self._complete = self._complete or output.finished
            yield result
        self.replayed, self.ended = False, True

    def with_comment(self, text: str) -> str:
        """Return events with the comment that tells what has come since the last one."""
        pieces, self._pieces = self._pieces, []
        complete, self._complete = self._complete, False
        return comment(pieces, complete=complete, events=text.count("\n\n")) + text


class _Events:
    """The events of a stream whose engine's outputs are kept for comments. `before`: the answer record that it continues."""

    def __init__(self, events: AsyncGenerator[str, None], outputs: _Outputs, before: str, *, hold_first: bool) -> None:
        self.events = events
        self.outputs = outputs
        self.before = before
        self.hold_first = hold_first

    async def with_comments(self) -> AsyncGenerator[str, None]:
        """Yield what the client does not have, with comments."""
        # A continued stream begins with a comment in any case: it shows that this is the rest of the answer. So does one that no
        # other engine could continue, and then tells nothing.
        first, held, holds = CONTINUED if self.before.strip(":") else "", "", self.hold_first
        begun = False
        # Events behind the last token that the client has.
        there = read(self.before)[1] - 1
        try:
            async for text in self.events:
                if not begun and self.outputs.unrecorded:
                    first = CONTINUED
                begun = True
                if self.outputs.replayed:
                    holds = False
                elif self.outputs.ended and there > 0:
                    there -= 1
                elif self.outputs.ended:
                    # The last outputs may have become no event.
                    yield (
                        first
                        + self.outputs.with_comment(held)
                        + comment([], complete=True, events=text.count("\n\n"))
                        + text
                    )
                    first = held = ""
                elif holds:
                    held, holds = text, False
                else:
                    yield first + self.outputs.with_comment(held + text)
                    first = held = ""
            if first or held:
                yield first + held
        finally:
            # What is driven by hand must be closed from the outside in.
            await self.events.aclose()


def _signature_with(function: Any, *names: str) -> inspect.Signature:
    """Return a function's signature. Raises AttributeError if it lacks one of the parameters."""
    signature = inspect.signature(function)
    for name in names:
        if name not in signature.parameters:
            raise AttributeError(f"{function.__qualname__} has no {name}")
    return signature


def telling(generator: Any, *, hold_first: bool, converted: Any = ()) -> Any:
    """Return a stream's generator such that it tells ids where they are asked for, and sends nothing that the client has.

    `hold_first`: the first event has no token (a role), and comes from the same output as the second: they are sent together,
    since the comment before them tells of both. `converted`: class of the servers that convert the events, and tell themselves.
    """
    signature = _signature_with(generator, "request", "result_generator")

    @functools.wraps(generator)
    def stream(self: Any, *args: Any, **more: Any) -> Any:
        bound = signature.bind(self, *args, **more)
        record = asked(bound.arguments["request"].vllm_xargs)
        if record is None:
            return generator(self, *args, **more)
        outputs = _Outputs(bound.arguments["result_generator"])
        bound.arguments["result_generator"] = outputs.passed_on()
        events = _Events(generator(*bound.args, **bound.kwargs), outputs, record, hold_first=hold_first)
        return events if isinstance(self, converted) else events.with_comments()

    return stream


# ---- Messages and Responses: an output may become several events ----


class _Starved:
    """Awaited by a _Feed that is empty. Whoever drives the coroutine by hand sees that it waits for the next event."""

    def __await__(self) -> Generator[None, None, None]:
        yield


class _Feed:
    """An asynchronous iterator over what is put into it."""

    def __init__(self) -> None:
        self.items: deque[Any] = deque()
        self.closed = False

    def __aiter__(self) -> _Feed:
        return self

    async def __anext__(self) -> Any:
        while not self.items:
            if self.closed:
                raise StopAsyncIteration
            await _Starved()
        return self.items.popleft()


async def _converted(
    converter: Callable[[Any], AsyncGenerator[str, None]],
    given: AsyncIterator[Any],
    names: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> AsyncGenerator[str, None]:
    """Yield, as one text, all that `converter` makes of each item, and what it makes of the end. It runs inside `names()`.

    A client must not get a part of what one output became: the comment before it tells of the whole. The converter awaits nothing
    but the next item, so it is driven by hand until it does.
    """
    feed = _Feed()
    made = converter(feed)
    waiting: Any = None

    def drained() -> str:
        nonlocal waiting
        texts = []
        with names():
            while True:
                waiting = waiting or made.__anext__()
                try:
                    waiting.send(None)
                except StopIteration as event:
                    waiting = None
                    texts.append(event.value)
                except StopAsyncIteration:
                    waiting = None
                    return "".join(texts)
                else:
                    return "".join(texts)

    try:
        async for item in given:
            feed.items.append(item)
            if text := drained():
                yield text
        feed.closed = True
        if text := drained():
            yield text
    finally:
        if waiting is not None:
            # The converter is suspended where it waits for an item, and ends there. close() would not reach it.
            with names(), suppress(GeneratorExit, StopIteration, StopAsyncIteration):
                waiting.throw(GeneratorExit())
        await made.aclose()


def telling_converted(converter: Any) -> Any:
    """Return AnthropicServingMessages.message_stream_converter such that it tells ids where they are asked for."""

    @functools.wraps(converter)
    def stream(self: Any, generator: Any) -> Any:
        if not isinstance(generator, _Events):
            return converter(self, generator)
        events = _converted(functools.partial(converter, self), generator.events)
        return _Events(events, generator.outputs, generator.before, hold_first=generator.hold_first).with_comments()

    return stream


class ItemIds:
    """In place of random_uuid in the modules of Responses. Inside `of` the ids of a response's items follow from the response's
    id, so that each engine gives an item the same one. Elsewhere they are random."""

    def __init__(self, random_uuid: Callable[[], str]) -> None:
        self._random_uuid = random_uuid
        self._counted: Iterator[str] | None = None

    def __call__(self) -> str:
        return self._random_uuid() if self._counted is None else next(self._counted)

    @property
    def counting(self) -> bool:
        """Whether ids follow from a response's id now."""
        return self._counted is not None

    @contextmanager
    def of(self, counted: Iterator[str]) -> Iterator[None]:
        """Take ids from `counted` inside the block, which awaits nothing."""
        self._counted = counted
        try:
            yield
        finally:
            self._counted = None


def naming_calls(opened: Any, ids: ItemIds) -> Any:
    """Return SimpleStreamingEventProcessor.open such that a call's id follows from the response's id, too: some parsers draw it
    themselves. An id that follows from the call (functions.NAME:NUMBER) stays."""
    signature = _signature_with(opened, "tool_call")

    @functools.wraps(opened)
    def open_item(*args: Any, **more: Any) -> Any:
        call = signature.bind(*args, **more).arguments.get("tool_call")
        if ids.counting and call is not None and call.id and not call.id.startswith("functions."):
            call.id = None
        return opened(*args, **more)

    return open_item


def _counted_ids(response_id: str) -> Iterator[str]:
    for number in itertools.count():
        yield hashlib.blake2b(f"{response_id}/{number}".encode(), digest_size=8).hexdigest()


class _Response(NamedTuple):
    """The stream of a response whose ids its comments tell: `generator` makes events of the contexts that it is given."""

    generator: Callable[[Any], Any]
    outputs: _Outputs
    before: str
    names: Callable[[], AbstractContextManager[None]]


def telling_responses(generator: Any, ids: ItemIds) -> Any:
    """Return OpenAIServingResponses.responses_stream_generator such that `telling_response_events` can tell ids."""
    from vllm.entrypoints.openai.responses.context import SimpleContext

    signature = _signature_with(generator, "request", "result_generator", "context")

    @functools.wraps(generator)
    def stream(self: Any, *args: Any, **more: Any) -> Any:
        bound = signature.bind(self, *args, **more)
        request, context = bound.arguments["request"], bound.arguments["context"]
        record = asked(request.vllm_xargs)
        # Other contexts ask the engine several times for one response.
        if record is None or type(context) is not SimpleContext:
            return generator(self, *args, **more)
        outputs = _Outputs(bound.arguments["result_generator"])

        def events_of(contexts: Any) -> Any:
            bound.arguments["result_generator"] = contexts
            return generator(*bound.args, **bound.kwargs)

        return _Response(events_of, outputs, record, functools.partial(ids.of, _counted_ids(request.request_id)))

    return stream


def telling_response_events(convert: Any) -> Any:
    """Return the function that writes a response's events such that it tells ids where they are asked for."""

    @functools.wraps(convert)
    def events(generator: Any) -> Any:
        if not isinstance(generator, _Response):
            return convert(generator)
        written = _converted(
            lambda feed: convert(generator.generator(feed)), generator.outputs.passed_on(), generator.names
        )
        return _Events(written, generator.outputs, generator.before, hold_first=False).with_comments()

    return events

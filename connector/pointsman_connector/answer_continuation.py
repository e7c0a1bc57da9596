"""Continues an answer that another engine has begun, as if this engine had generated it from its beginning.

A request with `vllm_xargs: {"pointsman_answer": TOLD}` has the told answer (told_answer.py) of an engine that is gone. The engine
core gets it as a part of the prompt, and computes what follows. The API server passes its ids through the detokenizer and through
vLLM's own parsers (reasoning, tool calls) in the same pieces as the first engine did, and sends nothing of that: the client has
it. So the stream goes on with the next token, and the usage at its end is that of the whole answer.

What the engine core computes from the output so far begins anew: random numbers of a seed, presence and frequency penalties,
grammars, limits of thinking. The gateway does not continue such answers.

`register` replaces methods of vLLM's API server: OutputProcessor.add_request, both ways to take an output from a
RequestOutputCollector, and the generators of streams (chat, completions, Messages). A request without the field passes through
vLLM's own code alone.
"""

from __future__ import annotations

import functools
import inspect
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator
from typing import Any

from pointsman_connector.told_answer import CONTINUED, FIELD, asked, comment, read

_REPLAYED = "pointsman_replayed"  # attribute of a RequestOutput that the client has
_REPLAY, _READY = "pointsman_replay", "pointsman_ready"  # attributes of a RequestOutputCollector


def register() -> None:
    """Replace vLLM's methods in this API server, once. Raises ImportError and AttributeError if this vLLM has others."""
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
    from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

    if hasattr(OutputProcessor.add_request, "__wrapped__"):
        return
    added = _continuing(OutputProcessor.add_request)
    taken, taken_now = _after_replay(RequestOutputCollector.get), _now_after_replay(RequestOutputCollector.get_nowait)
    chat = _telling(
        OpenAIServingChat.chat_completion_stream_generator, hold_first=True, converted=AnthropicServingMessages
    )
    messages = _telling_converted(AnthropicServingMessages.message_stream_converter)
    completion = _telling(OpenAIServingCompletion.completion_stream_generator, hold_first=False)
    # Nothing is replaced unless all of it can be.
    OutputProcessor.add_request = added
    RequestOutputCollector.get, RequestOutputCollector.get_nowait = taken, taken_now
    OpenAIServingChat.chat_completion_stream_generator = chat
    OpenAIServingCompletion.completion_stream_generator = completion
    AnthropicServingMessages.message_stream_converter = messages


# ---- the answer so far, before the engine's own outputs ----


def _continuing(add_request: Any) -> Any:
    """Return OutputProcessor.add_request such that a told answer is replayed, and the engine core gets it in the prompt."""

    from vllm.v1.engine import FinishReason

    @functools.wraps(add_request)
    def add(
        self: Any, request: Any, prompt: Any, parent_req: Any = None, request_index: int = 0, queue: Any = None
    ) -> Any:
        params = request.sampling_params
        told = asked(params.extra_args) if params is not None else None
        if told is None:
            return add_request(self, request, prompt, parent_req, request_index, queue)
        pieces, complete = read(told)
        ids = [one for piece in pieces for one in piece]
        rest = {name: value for name, value in params.extra_args.items() if name != FIELD}
        request.sampling_params = params = params.clone()
        params.extra_args = rest or None
        if not told.strip(":"):
            return add_request(self, request, prompt, parent_req, request_index, queue)
        left = (params.max_tokens or 0) - len(ids)
        if parent_req is not None or queue is None or (left <= 0 and not complete) or _begins_anew(request, params):
            raise ValueError("this answer cannot be continued")
        # With the parameters of the whole answer: the detokenizer holds as much text back as the first engine's did.
        added = add_request(self, request, prompt, parent_req, request_index, queue)
        state = self.request_states[request.request_id]
        if complete:
            # Only the usage and the stream's end are missing, for which the engine core has nothing to do.
            *pieces, last = pieces or [[]]
            reason = FinishReason.STOP if left > 0 else FinishReason.LENGTH
            outputs = [*_replayed(state, pieces), *_replayed(state, [last], reason)]
            setattr(queue, _READY, deque(outputs))
            self._finish_request(state)
            request.abort_immediately = True
            return added
        setattr(queue, _REPLAY, _replayed(state, pieces))
        # The state keeps the list of the client's prompt; the engine core gets a new one.
        request.prompt_token_ids = [*request.prompt_token_ids, *ids]
        request.sampling_params = params = params.clone()
        params.max_tokens, params.min_tokens = left, max(params.min_tokens - len(ids), 0)
        return added

    return add


def _replayed(state: Any, pieces: list[list[int]], finish_reason: Any = None) -> list[Any]:
    """Return the RequestOutputs of outputs with these ids, as the first engine's API server made them."""
    outputs = []
    # The other engine may have put out more or fewer tokens at a time than this one does.
    interval, state.stream_interval = state.stream_interval, 1
    for piece in pieces:
        stop = state.detokenizer.update(piece, False)
        output = state.make_request_output(piece, None, finish_reason, stop)
        if output is not None:
            setattr(output, _REPLAYED, True)
            outputs.append(output)
    state.stream_interval, state.sent_tokens_offset = interval, state.detokenizer.num_output_tokens()
    return outputs


def _begins_anew(request: Any, params: Any) -> bool:
    """Return whether the rest of an answer depends on more than its tokens, also by the engine's own defaults."""
    return bool(
        request.prompt_token_ids is None
        or request.prompt_embeds is not None
        or params.structured_outputs is not None
        or params.presence_penalty
        or params.frequency_penalty
        or params.bad_words
        or params.thinking_token_budget is not None
        or params.logprobs is not None
    )


def _ready(collector: Any, output: Any) -> Any:
    """Return the first output to take: that of the replay, which waits for the first output of the engine and takes over how much
    of the prompt that one found in the cache."""
    replay = collector.__dict__.pop(_REPLAY, None)
    if not replay:
        return output
    cached = getattr(output, "num_cached_tokens", None)
    if cached is not None:
        cached = output.num_cached_tokens = min(cached, len(output.prompt_token_ids))
    for one in replay:
        one.num_cached_tokens = cached
    ready = deque([*replay, output])
    first = ready.popleft()
    setattr(collector, _READY, ready)
    return first


def _after_replay(get: Any) -> Any:
    @functools.wraps(get)
    async def replaying(self: Any) -> Any:
        return _ready(self, await get(self))

    return replaying


def _now_after_replay(get_nowait: Any) -> Any:
    @functools.wraps(get_nowait)
    def replaying(self: Any) -> Any:
        if ready := self.__dict__.get(_READY):
            return ready.popleft()
        output = get_nowait(self)
        return output if output is None else _ready(self, output)

    return replaying


# ---- telling ----


class _Outputs:
    """Passes on the engine's outputs to a stream's generator, and keeps their ids until they are told."""

    def __init__(self, results: AsyncIterator[Any]) -> None:
        self._results = results
        self._pieces: list[list[int]] = []
        self._complete = False
        self.replayed = False  # whether the client has what the generator makes of the last output
        self.ended = False

    async def passed_on(self) -> AsyncIterator[Any]:
        """Yield the outputs. Raises GenerationError if the engine aborts."""
        from vllm.exceptions import GenerationError

        async for result in self._results:
            # Completions have (number of the prompt, output).
            output = result[1] if isinstance(result, tuple) else result
            self.replayed = getattr(output, _REPLAYED, False)
            if any(one.finish_reason in ("abort", "error") for one in output.outputs):
                # Not the answer's end: an error event follows, in the place of which another engine goes on.
                raise GenerationError("the engine has ended the answer")
            if not self.replayed:
                self._pieces += [list(one.token_ids) for one in output.outputs if one.token_ids]
                self._complete = self._complete or output.finished
            yield result
        self.replayed, self.ended = False, True

    def told_with(self, text: str) -> str:
        """Return events with the comment that tells what has come since the last one."""
        pieces, self._pieces = self._pieces, []
        complete, self._complete = self._complete, False
        return comment(pieces, complete=complete, events=text.count("\n\n")) + text


class _Events:
    """The events of a stream whose engine's outputs are kept to be told. `before`: the told answer that it continues."""

    def __init__(self, events: AsyncIterator[str], outputs: _Outputs, before: str, *, hold_first: bool) -> None:
        self.events = events
        self.outputs = outputs
        self.before = before
        self.hold_first = hold_first

    async def told(self) -> AsyncIterator[str]:
        """Yield what the client does not have, with comments."""
        # A continued stream begins with a comment in any case: it shows that this is the rest of the answer.
        first, held, holds = CONTINUED if self.before.strip(":") else "", "", self.hold_first
        # Events behind the last token that the client has.
        there = read(self.before)[1] - 1
        async for text in self.events:
            if self.outputs.replayed:
                holds = False
            elif self.outputs.ended and there > 0:
                there -= 1
            elif self.outputs.ended:
                # The last outputs may have become no event.
                yield (
                    first + self.outputs.told_with(held) + comment([], complete=True, events=text.count("\n\n")) + text
                )
                first = held = ""
            elif holds:
                held, holds = text, False
            else:
                yield first + self.outputs.told_with(held + text)
                first = held = ""
        if first or held:
            yield first + held


def _telling(generator: Any, *, hold_first: bool, converted: Any = ()) -> Any:
    """Return a stream's generator such that it tells ids where they are asked for, and sends nothing that the client has.

    `hold_first`: the first event has no token (a role), and comes from the same output as the second: they are sent together,
    since the comment before them tells of both. `converted`: class of the servers that convert the events, and tell themselves.
    """
    signature = inspect.signature(generator)
    for name in ("request", "result_generator"):
        if name not in signature.parameters:
            raise AttributeError(f"{generator.__qualname__} has no {name}")

    @functools.wraps(generator)
    def stream(self: Any, *args: Any, **more: Any) -> Any:
        bound = signature.bind(self, *args, **more)
        told = asked(bound.arguments["request"].vllm_xargs)
        if told is None:
            return generator(self, *args, **more)
        outputs = _Outputs(bound.arguments["result_generator"])
        bound.arguments["result_generator"] = outputs.passed_on()
        events = _Events(generator(*bound.args, **bound.kwargs), outputs, told, hold_first=hold_first)
        return events if isinstance(self, converted) else events.told()

    return stream


# ---- Messages: a stream that is made from a chat's events ----


class _Starved:
    """Awaited by a _Feed that is empty. Whoever drives the coroutine by hand sees that it waits for the next event."""

    def __await__(self) -> Generator[None, None, None]:
        yield


class _Feed:
    """An asynchronous iterator over what is put into it."""

    def __init__(self) -> None:
        self.items: deque[str] = deque()
        self.closed = False

    def __aiter__(self) -> _Feed:
        return self

    async def __anext__(self) -> str:
        while not self.items:
            if self.closed:
                raise StopAsyncIteration
            await _Starved()
        return self.items.popleft()


async def _converted(converter: Callable[[Any], AsyncIterator[str]], events: AsyncIterator[str]) -> AsyncIterator[str]:
    """Yield, as one text, all that `converter` makes of each event, and what it makes of the end.

    A client must not get a part of what one output became: the comment before it tells of the whole. The converter awaits nothing
    but the next event, so it is driven by hand until it does.
    """
    feed = _Feed()
    made = converter(feed)
    waiting: Any = None

    def drained() -> str:
        nonlocal waiting
        texts = []
        while True:
            waiting = waiting or made.__anext__()
            try:
                waiting.send(None)
            except StopIteration as event:
                texts.append(event.value)
                waiting = None
            except StopAsyncIteration:
                return "".join(texts)
            else:
                return "".join(texts)

    async for event in events:
        feed.items.append(event)
        if text := drained():
            yield text
    feed.closed = True
    if text := drained():
        yield text


def _telling_converted(converter: Any) -> Any:
    """Return AnthropicServingMessages.message_stream_converter such that it tells ids where they are asked for."""

    @functools.wraps(converter)
    def stream(self: Any, generator: Any) -> Any:
        if not isinstance(generator, _Events):
            return converter(self, generator)
        events = _converted(functools.partial(converter, self), generator.events)
        return _Events(events, generator.outputs, generator.before, hold_first=generator.hold_first).told()

    return stream

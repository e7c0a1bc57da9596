"""SSE streams through the gateway: any cut, usage that only the gateway requested, and errors that reveal addresses."""

from __future__ import annotations

import json
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman_gateway.core.api import Endpoint, ErrorFormat, begins_with_error, redact_error_event
from pointsman_gateway.core.request.own_prefills import OwnPrefills
from pointsman_gateway.core.streaming import sse
from pointsman_gateway.core.streaming.parse_stream_end import TAIL_BYTES, StreamEnd, Usage
from pointsman_gateway.core.streaming.sse import MAX_CORRECTED_BYTES, MAX_HELD_BYTES, SseFilter

USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}


def stream(*events: object, done: bool = True) -> bytes:
    text = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    return (text + ("data: [DONE]\n\n" if done else "")).encode()


def cut_up(whole: bytes, cuts: list[int]) -> list[bytes]:
    pieces, at = [], 0
    for cut in [*cuts, len(whole)]:
        pieces.append(whole[at : at + cut])
        at += cut
    return [piece for piece in pieces if piece]


WORDS = st.integers(0, 50)
CUTS = st.lists(st.integers(1, 400), max_size=60)


@given(CUTS, WORDS, st.booleans())
def test_usage_is_found_however_the_stream_is_cut(cuts: list[int], words: int, ours: bool) -> None:
    said = [{"choices": [{"delta": {"content": 'w"usage"' * 30}}]} for _ in range(words)]
    whole = stream(*said, {"choices": [], "usage": USAGE})
    events = SseFilter(Endpoint.CHAT, hide_usage=ours)
    out = [events.feed(piece) for piece in cut_up(whole, cuts)]
    assert events.stream_end() == StreamEnd(True, Usage(7, 4, 3))
    assert events.count == words + 2
    assert b"".join(out) == (stream(*said) if ours else whole)
    assert all(piece == b"" or piece.endswith(b"\n\n") for piece in out)
    assert events._tail._size <= TAIL_BYTES + max(map(len, cut_up(whole, cuts))) + 400


def test_only_whole_events_go_out_until_one_is_too_long_to_wait_for() -> None:
    events = SseFilter(Endpoint.CHAT)
    assert events.feed(b'data: {"a"') == b""
    assert events.feed(b": 1}\r\n\r\ndata") == b'data: {"a": 1}\r\n\r\n'
    long = b"x" * MAX_HELD_BYTES
    assert events.feed(long) == b"data" + long
    assert events.mid_event
    assert events.feed(b"y") == b"y"
    assert events.feed(b"z\n\n") == b"z\n\n"
    assert not events.mid_event
    assert events.feed(b"data: [DONE]\n") == b""
    assert events.flush() == b"data: [DONE]\n"
    assert events.mid_event


def completed(size: int, cached: int) -> bytes:
    """The last event of a response, with an answer of `size` bytes."""
    usage = {"input_tokens": 1200, "input_tokens_details": {"cached_tokens": cached}, "output_tokens": 3}
    response = {
        "id": "r",
        "status": "completed",
        "output": [{"type": "message", "text": "x" * size}],
        "usage": usage,
        "user": None,
    }
    data = json.dumps({"type": "response.completed", "sequence_number": 9, "response": response}, separators=(",", ":"))
    return b"event: response.completed\ndata: %b\n\n" % data.encode()


@pytest.mark.parametrize("cut", [1, 40, 70, 90, 120])
def test_usage_of_a_long_last_event_is_corrected_wherever_it_is_cut(cut: int) -> None:
    """`cut` bytes before its end: behind, within and before the usage."""
    own = OwnPrefills()
    own.begun("a", 1000, 16)
    own.ended("a", 1000, 0, 16)
    events = SseFilter(Endpoint.RESPONSES)
    events.correct_usage = partial(own.corrected_events, "a")
    before, after = completed(200_000, 992), completed(200_000, 16)
    pieces = cut_up(before, [65_000, 65_000, 65_000, len(before) - 195_000 - cut])
    assert b"".join(map(events.feed, pieces)) + events.flush() == after
    assert events.stream_end() == StreamEnd(True, Usage(1200, 992, 3, "stop"), "", 9)


def test_a_last_event_that_is_too_long_to_hold_has_the_engines_usage() -> None:
    events = SseFilter(Endpoint.RESPONSES)
    events.correct_usage = lambda piece: piece.replace(b"992", b"16")
    before = completed(MAX_CORRECTED_BYTES, 992)
    out, held = [], 0
    for piece in cut_up(before, [65_536] * (len(before) // 65_536)):
        out.append(events.feed(piece))
        held = max(held, len(events._held))
    assert held <= MAX_CORRECTED_BYTES
    assert len(b"".join(out)) >= MAX_CORRECTED_BYTES
    assert events.stream_end().complete


def test_an_early_end_and_an_engines_own_error_are_seen() -> None:
    events = SseFilter(Endpoint.CHAT)
    events.feed(stream({"choices": []}, done=False))
    assert events.stream_end().complete is False
    events.feed(stream({"error": {"message": "dead"}}))
    assert events.stream_end() == StreamEnd(True, Usage(), "the engine reported an error")
    assert events.count == 3
    assert SseFilter(Endpoint.CHAT).stream_end() == StreamEnd(False)


def framed(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)


@given(st.lists(st.sampled_from(["word", "usage", "error", "own error", "ours"]), max_size=12), CUTS, st.booleans())
def test_chunks_that_pass_and_pieces_that_are_fed_are_one_stream(kinds: list[str], cuts: list[int], ours: bool) -> None:
    said: dict[str, object] = {
        "word": {"choices": [{"delta": {"content": "w"}}]},
        "usage": {"choices": [{"delta": {"content": "w"}}], "usage": USAGE},
        "error": {"choices": [{"delta": {"content": "error"}}]},
        "own error": {"error": {"message": "at 10.0.0.7", "type": "T", "param": None, "code": 500}},
        "ours": {"choices": [], "usage": USAGE},
    }
    chunks = [stream(said[endpoint], done=False) for endpoint in kinds] + [b"data: [DONE]\n\n"]
    whole, notable = (SseFilter(Endpoint.CHAT, hide_usage=ours) for _ in range(2))
    expected = b"".join(whole.feed(piece) for piece in cut_up(b"".join(chunks), cuts))
    events = SseFilter(Endpoint.CHAT, hide_usage=ours)
    out = before = b""
    for endpoint, chunk in zip([*kinds, "done"], chunks, strict=True):
        passed = events.pass_whole(framed(chunk))
        assert bool(passed) == (endpoint == "word")
        if passed:
            out += chunk
            before = chunk
        else:
            # The parser may receive the chunk in any pieces.
            out += b"".join(events.feed(piece) for piece in cut_up(chunk, cuts[:3]))
            notable.feed(before + chunk)
            before = b""
    assert out == expected
    assert b"10.0.0.7" not in out
    assert events.stream_end() == notable.stream_end()
    assert events.count == whole.count


@pytest.mark.parametrize("endpoint", [Endpoint.MESSAGES, Endpoint.RESPONSES])
def test_where_the_last_event_is_json_the_last_chunk_that_passed_tells_the_end(endpoint: Endpoint) -> None:
    last = {
        Endpoint.MESSAGES: b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
        Endpoint.RESPONSES: b'event: response.completed\ndata: {"sequence_number":9,"type":"response.completed"}\n\n',
    }[endpoint]
    word = b'event: x\ndata: {"sequence_number":8,"type":"x"}\n\n'
    events = SseFilter(endpoint)
    assert events.pass_whole(framed(word))
    assert not events.stream_end().complete
    assert events.feed(b": fed between\n\n")
    assert events.pass_whole(framed(word))
    assert events.pass_whole(framed(last))
    assert events.stream_end().complete
    assert events.stream_end().sequence_number == (9 if endpoint is Endpoint.RESPONSES else -1)
    assert events.count == 3


@pytest.mark.parametrize("endpoint", [Endpoint.CHAT, Endpoint.COMPLETION])
def test_a_finish_reason_is_told_also_if_its_chunk_passes(endpoint: Endpoint) -> None:
    events = SseFilter(endpoint, hide_usage=True)
    for reason in (None, "tool_calls"):
        assert events.pass_whole(framed(stream({"choices": [{"index": 0, "finish_reason": reason}]}, done=False)))
    assert events.feed(stream({"choices": [], "usage": USAGE}, done=False)) == b""
    assert events.feed(b"data: [DONE]\n\n")
    assert events.stream_end() == StreamEnd(True, Usage(7, 4, 3, "tool_calls"))


@pytest.mark.parametrize("end", ["\n\n", "\r\n\r\n"])
def test_usage_that_only_the_gateway_requested_is_dropped_among_events_of_either_end(end: str) -> None:
    word, usage = json.dumps({"choices": [{"delta": {"content": "w"}}]}), json.dumps({"choices": [], "usage": USAGE})
    word, usage, done = (f"data: {said}{end}" for said in (word, usage, "[DONE]"))
    assert SseFilter(Endpoint.CHAT, hide_usage=True).feed((word + usage + done).encode()) == (word + done).encode()


def test_a_chunk_does_not_pass_into_the_middle_of_an_event() -> None:
    events = SseFilter(Endpoint.CHAT)
    chunk = framed(stream({"a": 1}, done=False))
    assert events.pass_whole(chunk)
    assert events.feed(b'data: {"b"') == b""
    assert not events.pass_whole(chunk)
    assert events.feed(b": 1}\n\n") == b'data: {"b": 1}\n\n'
    assert events.pass_whole(chunk)
    assert not events.pass_whole(framed(b"data: {"))
    assert events.feed(b"x" * (MAX_HELD_BYTES + 1))
    assert not events.pass_whole(chunk), "a piece of an event is out"


TRACE = 'no KV\nTraceback (most recent call last):\n  File "/srv/secret.py", line 1'
TOLD = "lost tcp://10.0.0.7:5557 and node-7.cluster.local:8000 " + TRACE
GAVE_UP = {
    "message": "The instance failed while it answered.",
    "type": "server_error",
    "param": None,
    "code": 502,
}
SAFE = "lost <address> and <address> no KV"


@pytest.mark.parametrize("cut", [1, 7, 1000])
@pytest.mark.parametrize(
    ("endpoint", "event", "seen"),
    [
        (
            Endpoint.CHAT,
            {"error": {"message": TOLD, "type": "E", "param": None, "code": 500, "trace": TRACE}, "detail": TRACE},
            {"error": {"message": SAFE, "type": "E", "param": None, "code": 500}},
        ),
        (Endpoint.CHAT, {"error": TOLD}, {"error": {"message": SAFE, "type": None, "param": None, "code": None}}),
        (
            Endpoint.COMPLETION,
            {"object": "error", "message": TOLD, "type": "E", "param": {"at": TRACE}, "code": 400},
            {"error": {"message": SAFE, "type": "E", "param": None, "code": 400}},
        ),
        (
            Endpoint.CHAT,
            {"choices": [{"index": 0, "delta": {"content": ""}, "finish_reason": "abort", "stop_reason": None}]},
            {"error": GAVE_UP},
        ),
        (Endpoint.COMPLETION, {"choices": [{"index": 0, "text": "", "finish_reason": "abort"}]}, {"error": GAVE_UP}),
        (
            Endpoint.MESSAGES,
            {"type": "message_delta", "delta": {"stop_reason": None, "stop_sequence": None}, "usage": {}},
            {"type": "error", "error": {"type": "api_error", "message": GAVE_UP["message"]}},
        ),
        (
            Endpoint.CHAT,
            {"error": {"message": TRACE[6:]}},
            {"error": {"message": "The engine reported an error.", "type": None, "param": None, "code": None}},
        ),
        (
            Endpoint.MESSAGES,
            {"type": "error", "error": {"type": "overloaded_error", "message": TOLD}},
            {"type": "error", "error": {"type": "overloaded_error", "message": SAFE}},
        ),
        (
            Endpoint.MESSAGES,
            {"error": {"message": TOLD, "type": "InternalServerError"}},
            {"type": "error", "error": {"type": "api_error", "message": SAFE}},
        ),
        (
            Endpoint.RESPONSES,
            {"type": "error", "code": "x", "message": TOLD, "param": None, "sequence_number": 5},
            {"type": "error", "code": "x", "message": SAFE, "param": None, "sequence_number": 5},
        ),
        (
            Endpoint.RESPONSES,
            {"error": {"message": TOLD, "code": 500}},
            {"type": "error", "code": "server_error", "message": SAFE, "param": None, "sequence_number": 4},
        ),
        (
            Endpoint.RESPONSES,
            {"response": {"error": {"message": TOLD, "code": "c"}}, "sequence_number": 4, "type": "response.failed"},
            {"response": {"error": {"message": SAFE, "code": "c"}}, "sequence_number": 4, "type": "response.failed"},
        ),
    ],
)
def test_an_engines_own_error_says_no_more_than_an_error_body_would(
    endpoint: Endpoint, event: dict[str, object], seen: dict[str, object], cut: int
) -> None:
    events = SseFilter(endpoint)
    before = stream({"sequence_number": 3}, done=False)
    assert not events.pass_whole(framed(stream(event, done=False)))
    pieces = cut_up(before + stream(event, done=False), [cut] * 2000)
    out = b"".join(events.feed(piece) for piece in pieces)
    name, found, data = out.removeprefix(before).rpartition(b"data: ")
    assert out.startswith(before)
    assert data.endswith(b"\n\n")
    assert found
    assert json.loads(data) == seen
    assert name == (b"event: error\n" if seen.get("type") == "error" else b"")
    assert events.stream_end().error
    assert events.stream_end().complete == (endpoint not in (Endpoint.CHAT, Endpoint.COMPLETION)), (
        "these end with [DONE]"
    )


@pytest.mark.parametrize("error_format", ErrorFormat)
@pytest.mark.parametrize(
    "event",
    [
        b'data: {"choices":[{"delta":{"content":"error"}}]}',
        b'event: response.created\ndata: {"response":{"error":null,"status":"in_progress"},"type":"response.created"}',
        b'data: {"delta":"error","type":"response.output_text.delta"}',
        b'data: {"error":null,"choices":[]}',
        b'event: message_start\ndata: {"type":"message_start","message":{"content":[],"stop_reason":null}}',
        b'data: {"type":"content_block_delta","delta":{"partial_json":"{\\"delta\\":{\\"stop_reason\\":null}"}}',
        b'data: {"type":"message_delta","delta":{"stop_reason":"end_turn","stop_sequence":null},"usage":{}}',
        b'data: {"choices":[{"delta":{"content":"\\"finish_reason\\":\\"abort\\""},"finish_reason":"stop"}]}',
        b'data: {"choices":[{"delta":{"content":"abort"},"finish_reason":null}]}',
        b': "error"',
        b'data: ["error"]',
    ],
)
def test_what_only_speaks_of_errors_is_left_as_it_is(error_format: ErrorFormat, event: bytes) -> None:
    assert redact_error_event(error_format, event) is event


@pytest.mark.parametrize("cut", [7, 10_000])
def test_a_response_that_repeats_its_request_is_no_abort(cut: int) -> None:
    response = {"metadata": {"finish_reason": "abort"}, "tools": [{"parameters": {"finish_reason": "abort"}}]}
    event = stream({"response": response, "sequence_number": 0, "type": "response.created"}, done=False)
    events = SseFilter(Endpoint.RESPONSES)
    assert b"".join(map(events.feed, cut_up(event, [cut] * 100))) == event


def test_an_error_that_is_no_json_or_has_no_end_is_a_plain_sentence() -> None:
    for text in (
        b"event: error\ndata: boom at 10.0.0.7",
        b'event: error\ndata: "at 10.0.0.7"',
        b'data: {"error": 10.0.0.7}',
    ):
        events = SseFilter(Endpoint.CHAT)
        assert events.feed(text) == b""
        out = events.flush()
        assert b"10.0.0.7" not in out
        assert json.loads(out.removeprefix(b"data: "))["error"]["message"]
    events = SseFilter(Endpoint.CHAT)
    out = events.feed(b'data: {"error": {"message": "10.0.0.7')
    for _ in range(20):
        out += events.feed(b"10.0.0.7 " * 10_000)
    assert out == b""
    assert len(events._held) < 2 * MAX_HELD_BYTES
    out = events.feed(b'"}}\n') + events.feed(b"\ndata: [DONE]\n\n")
    assert b"10.0.0.7" not in out
    assert out.endswith(b"\n\ndata: [DONE]\n\n")
    assert json.loads(out.partition(b"\n")[0].removeprefix(b"data: "))["error"]["message"]


def test_the_end_of_a_torn_event_is_not_taken_for_an_event() -> None:
    events = SseFilter(Endpoint.CHAT)
    begin = b'data: {"a": "' + b"x" * MAX_HELD_BYTES
    assert events.feed(begin) == begin
    end = b'"\ndata: , "b": "error"}\n\n'
    assert events.feed(end + b'data: {"error": "10.0.0.7"}\n\n').startswith(end + b'data: {"error":{')


@pytest.mark.parametrize(
    ("piece", "error"),
    [
        (b'data: {"error": {"message": "x"}}\n\n', True),
        (b'data: {"object":"error","message":"x"}\n\n', True),
        (b"event: error\ndata: {}\n\n", True),
        (b'data: {"id":"x","choices":[{"delta":{"content":"{\\"error\\""}}]}\n\n', False),
        (b"", False),
    ],
)
def test_streams_that_begin_with_an_error(piece: bytes, error: bool) -> None:
    assert begins_with_error(piece) is error


# ---- answers that another instance can continue ----


def chunked(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)


def event(word: str) -> bytes:
    return stream({"choices": [{"delta": {"content": word}}]}, done=False)


def recording_filter() -> SseFilter:
    events = SseFilter(Endpoint.CHAT, tells=True)
    events.record = bytearray()
    return events


def test_what_the_client_has_is_recorded_from_chunks_that_pass_whole_and_from_others() -> None:
    events = recording_filter()
    assert not events.can_continue
    assert events.pass_whole(chunked(b":5\n\n" + event("a"))) == chunked(event("a"))
    assert events.feed(b":6:7,8\n\n" + event("b") + b":9\n\n" + event("c")) == event("b") + event("c")
    assert events.pass_whole(chunked(event("no comment"))) == chunked(event("no comment"))
    assert not events.pass_whole(chunked(b":1\n\n" + event("x") + b":2\n\n" + event("y")))
    assert events.pass_whole(chunked(b":10.\n\n" + event("d"))) == chunked(event("d"))
    assert bytes(events.record or b"") == b":5:6:7,8:9:10."
    assert events.can_continue
    assert events.count == 5


@pytest.mark.parametrize("whole", [True, False])
def test_a_record_that_grows_asks_for_memory(whole: bool) -> None:
    """In steps; without memory the answer is sent on and cannot be continued."""
    asked: list[int] = []

    def more(size: int) -> bool:
        asked.append(size)
        return len(asked) < 3

    events = recording_filter()
    events.record_limit, events.more = 10, more
    piece = b":12345\n\n" + event("a")
    for at in range(1, 3 * sse.RECORD_STEP // 6):
        assert (events.pass_whole(chunked(piece)) if whole else events.feed(piece)).count(b"data:") == 1
        assert events.can_continue is (len(asked) < 3)
        assert len(asked) == min(3, -(-max(6 * at - 10, 0) // sse.RECORD_STEP))
    assert asked == [sse.RECORD_STEP] * 3
    assert events.record is None


@given(CUTS, st.lists(st.integers(0, 99_999), min_size=1, max_size=30))
def test_what_is_recorded_and_what_is_sent_agree_however_the_stream_is_cut(cuts: list[int], ids: list[int]) -> None:
    whole = b"".join(b":%d\n\n" % token_id + event(f"{token_id}\\n:3") for token_id in ids)
    events, out = recording_filter(), b""
    for piece in cut_up(whole, cuts)[:-1]:
        out += events.feed(piece)
        sent = [json.loads(event_bytes[6:]) for event_bytes in out.split(b"\n\n") if event_bytes]
        words = [message["choices"][0]["delta"]["content"].partition("\\")[0] for message in sent]
        assert bytes(events.record or b"") == "".join(f":{word}" for word in words).encode(), (
            "an id is recorded with its event"
        )


def test_an_error_of_the_instance_is_not_sent_if_another_one_can_go_on() -> None:
    events = recording_filter()
    failed = b'data: {"error": {"message": "at 10.0.0.7", "code": 500}}\n\ndata: [DONE]\n\n'
    assert events.feed(b":5\n\n" + event("a") + failed) == event("a")
    assert not events.pass_whole(chunked(event("late")))
    assert events.feed(event("late")) == b""
    assert not events.stream_end().complete
    assert events.can_continue
    events.begin_again()
    rest = event("b") + b"data: [DONE]\n\n"
    assert events.feed(b":6.\n\n" + rest) == rest
    assert bytes(events.record or b"") == b":5:6."
    assert events.stream_end().complete


def test_an_error_before_anything_is_recorded_is_sent_redacted() -> None:
    events = recording_filter()
    assert b"at <address>" in events.feed(b'data: {"error": {"message": "at 10.0.0.7", "code": 500}}\n\n')


def test_the_beginning_of_an_event_is_dropped_with_its_instance() -> None:
    events = recording_filter()
    events.feed(b":5\n\n" + event("a") + b"data: {")
    assert events.flush() == b""
    events.begin_again()
    assert events.feed(b":6\n\n" + event("b")) == event("b")


def test_comments_are_not_sent_either_where_the_answer_cannot_be_continued() -> None:
    events = SseFilter(Endpoint.CHAT, tells=True)
    assert events.pass_whole(chunked(b":5\n\n" + event("a"))) == chunked(event("a"))
    assert events.feed(b":6\n\n" + event("b") + b":\n\n") == event("b")
    assert not events.can_continue
    others = SseFilter(Endpoint.CHAT)
    assert others.feed(b":5\n\n") == b":5\n\n", "a comment that nobody asked for is the instance's own"


def test_a_model_that_writes_of_errors_is_not_cut() -> None:
    events = recording_filter()
    for word in ("error", "event: error", 'a \\"error\\": {'):
        assert events.feed(b":5\n\n" + event(word)) == event(word)
    assert bytes(events.record or b"") == b":5:5:5"


def test_an_abort_is_cut_with_its_comment() -> None:
    events = recording_filter()
    aborted = b'data: {"choices": [{"delta": {}, "finish_reason": "abort"}]}\n\n'
    assert events.feed(b":5\n\n" + event("a") + b":6.\n\n" + aborted) == event("a")
    assert bytes(events.record or b"") == b":5", "the answer is not complete"
    assert events.can_continue


def test_without_a_token_there_is_nothing_to_continue() -> None:
    events = recording_filter()
    failed = b'data: {"error": {"message": "at 10.0.0.7", "code": 500}}\n\n'
    assert b"at <address>" in events.feed(b":x2\n\n" + event("") + failed)
    assert not events.can_continue


@given(CUTS, st.lists(st.integers(1, 4), min_size=1, max_size=8))
def test_events_of_one_comment_are_sent_all_at_once(cuts: list[int], groups: list[int]) -> None:
    whole = b"".join(
        b":%d%b\n\n" % (number, b"x%d" % count if count > 1 else b"") + b"".join(event("w") for _ in range(count))
        for number, count in enumerate(groups)
    )
    sums = {sum(groups[:end]) for end in range(len(groups) + 1)}
    events, out = recording_filter(), b""
    for piece in cut_up(whole, cuts):
        out += events.feed(piece)
        assert out.count(b"data:") in sums
        record = events.record
        assert record is not None
        assert sum(groups[: record.count(b":")]) == out.count(b"data:")
    assert out.count(b"data:") == sum(groups)


def test_a_chunk_with_some_of_the_events_that_its_comment_tells_of_waits_for_the_others() -> None:
    events = recording_filter()
    first, second = event("a"), event("b")
    assert events.pass_whole(chunked(b":5x2\n\n" + first)) == b""
    assert events.feed(b":5x2\n\n" + first) == b""
    assert not events.can_continue, "nothing is recorded of what the client has not got"
    assert events.pass_whole(chunked(second)) == b""
    assert events.feed(second) == first + second
    assert bytes(events.record or b"") == b":5"
    both = b":6.x2\n\n" + first + second
    assert events.pass_whole(chunked(both)) == chunked(first + second)
    assert bytes(events.record or b"") == b":5:6."
    assert events.count == 4


@given(CUTS, st.lists(st.integers(1, 4), min_size=1, max_size=8))
def test_chunks_are_recorded_with_all_of_their_events_however_a_proxy_cuts(cuts: list[int], groups: list[int]) -> None:
    single = [
        (b":%d%b\n\n" % (number, b"x%d" % count if count > 1 else b"") if not of_group else b"") + event("w")
        for number, count in enumerate(groups)
        for of_group in range(count)
    ]
    sums = {sum(groups[:end]) for end in range(len(groups) + 1)}
    events, out, at = recording_filter(), b"", 0
    for cut in [*cuts, len(single)]:
        body, at = b"".join(single[at : at + cut]), at + cut
        if body:
            passed = events.pass_whole(chunked(body))
            out += passed.partition(b"\r\n")[2].removesuffix(b"\r\n") if passed else events.feed(body)
        assert out.count(b"data:") in sums
        assert events.record is not None
        assert sum(groups[: events.record.count(b":")]) == out.count(b"data:")


@pytest.mark.parametrize("comment", [b": ping", b":5 x2", b":5x" + b"9" * 5_000])
def test_a_comment_that_tells_no_ids_is_passed_on_and_not_recorded(comment: bytes) -> None:
    events = recording_filter()
    body = comment + b"\n\n" + event("a")
    passed = events.pass_whole(chunked(body))
    assert (passed or chunked(events.feed(body))) == chunked(body)
    assert not events.record


def test_events_that_are_announced_and_never_come_are_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sse, "MAX_TOLD_BYTES", 5 * len(event("a")))
    events = recording_filter()
    assert [events.feed(b":5x999\n\n" + event("a")), *(events.feed(event("a")) for _ in range(3))] == [b""] * 4
    assert events.feed(event("a")) == event("a") * 5
    assert not events.can_continue
    assert events.feed(b":6\n\n" + event("b")) == event("b")

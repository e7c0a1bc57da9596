"""Two other models behind one gateway: a vision and an embedding model. And a request's trace, down to the engine's own span."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from pointsman.router.v1 import fleet_pb2
from pointsman_common.core.tracing import SpanContext
from tests.support.engines.chat_client import (
    Answer,
    Message,
    assert_agree,
    assistant,
    chat,
    complete,
    fresh_words,
    prompt_tokens,
    user,
)
from tests.support.engines.model import words
from tests.support.engines.servers import Engine, EngineSpec, make_model, running_engines
from tests.support.fakes.span_collector import Collector, collecting
from tests.support.http_request import ask
from tests.support.processes.control_plane import ControlPlane, client_of

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

EYES, VECTORS = "eyes", "vectors"
BLOCK = 32
IMAGE_TOKENS = 67  # tests/support/engines/vision_model.py
# "<|im_start|>user\n"
HEAD = 3


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="module")
def pair(model_folder: Path, collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Engine]]:
    """The vision model, which sends its spans to the collector, and the embedding model."""
    folder = tmp_path_factory.mktemp("other")
    make_model(folder / EYES, maker="vision_model.py")
    traced, pooling = ("--otlp-traces-endpoint", collector.url), ("--runner", "pooling", "--convert", "embed")
    specs = (
        EngineSpec(EYES, BLOCK, served=EYES, model=folder / EYES, extra_args=traced),
        EngineSpec(VECTORS, BLOCK, served=VECTORS, extra_args=pooling),
    )
    with running_engines(specs, model_folder, folder) as engines:
        yield engines


@pytest.fixture(scope="module")
def running(
    pair: list[Engine], collector: Collector, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ControlPlane]:
    """One router and one gateway for both; the gateway knows each by another name too."""
    traces = {"--otlp-endpoint": collector.url}
    aliases = {"--aliases": f"picture={EYES} vector={VECTORS}"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        patch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "60")
        plane = ControlPlane(
            pair, tmp_path_factory.mktemp("plane"), router_flags=traces, gateway_flags=traces | aliases
        )
        plane.start()
    yield plane
    plane.stop()


@pytest.fixture
def plane(running: ControlPlane) -> Iterator[ControlPlane]:
    with running.in_step() as plane:
        yield plane


@pytest.fixture
def client(plane: ControlPlane) -> Iterator[openai.OpenAI]:
    with plane.client() as client:
        yield client


# ---- the vision model ----


def image(*colour: int) -> dict[str, Any]:
    """A small picture of one colour, in the message itself."""
    side = 8
    rows = (b"\0" + bytes(colour) * side) * side

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(png).decode()}"}}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def says(*parts: dict[str, Any]) -> Message:
    return {"role": "user", "content": list(parts)}


def see(client: openai.OpenAI, *messages: Message, **more: Any) -> Answer:
    return chat(client, list(messages), model=EYES, **more)


def blocks(tokens: int) -> int:
    """The known tokens that are in whole blocks."""
    return tokens // BLOCK * BLOCK


def assert_text_is_predicted(plane: ControlPlane, answer: Answer, before: int, cached: int) -> None:
    """Check that the request was placed by the `before` tokens of text before the first image, that the engine had `cached`
    tokens, and that no more were predicted."""
    decision = plane.finished_decision(answer.decision_id)
    assert decision.key_count == before // 16
    assert decision.cached_tokens == min(blocks(before), cached)
    assert decision.finished.cached_tokens == answer.cached_tokens == cached
    assert decision.outcome == fleet_pb2.DECISION_OUTCOME_OK


def test_pictures_are_placed_by_the_text_before_the_first(plane: ControlPlane, client: openai.OpenAI) -> None:
    """The same picture is shared, too, which only the engine knows; a different one shares nothing from its own block on."""
    start, rest = fresh_words(107), fresh_words(60)
    before = HEAD + 107
    red = says(text(start), image(255, 0, 0), text(rest))
    first = see(client, red)
    assert_text_is_predicted(plane, first, before, 0)
    whole = prompt_tokens(first)
    assert whole == before + IMAGE_TOKENS + 60 + 5
    plane.wait_settled()
    again = see(client, red)
    assert again.text == first.text
    assert_text_is_predicted(plane, again, before, blocks(whole - 1))
    blue = see(client, says(text(start), image(0, 0, 255), text(rest)))
    assert blue.text != first.text
    # 110 tokens of text: the block in which the picture begins is not shared, though 14 tokens of text are in it.
    assert_text_is_predicted(plane, blue, before, 96)
    plane.wait_settled()
    # The conversation goes on; another picture comes into it.
    on = (red, assistant(first.text), says(text(fresh_words(20)), image(0, 255, 0)))
    second = see(client, *on)
    assert_text_is_predicted(plane, second, before, blocks(whole + 15))


def test_the_text_before_a_picture_goes_in_slices(plane: ControlPlane, client: openai.OpenAI) -> None:
    """No slice reaches the picture, which only the engine can count; the last part finds what the slices computed."""
    see(client, user(fresh_words(10)))  # the mean work must be known before anything is heavy
    plane.wait_idle()
    seen = says(text(fresh_words(300)), image(0, 128, 0), text(fresh_words(200)))
    part = 3 * BLOCK
    settings = {
        "slice_factor": 1e-6,
        "slice_min_tokens": part,
        "heavy_wait_factor": 1e6,
        "light_wait_factor": 1e6,
        "light_factor": 1e-3,
    }
    with plane.policy("foresight", **settings):
        answer = see(client, seen)
        plan = plane.plan(answer.decision_id)
    assert [(decision.reason, decision.steps[0].prefix_tokens) for decision in plan] == [
        ("slice", part),
        ("slice", 2 * part),
        ("slice", 3 * part),
        ("last_part", 0),
    ]
    assert {decision.outcome for decision in plan} == {fleet_pb2.DECISION_OUTCOME_OK}
    # What its own slices computed is found by the last part, and is no cache hit of the request.
    done = plane.finished_decision(answer.decision_id).finished
    assert (answer.cached_tokens, done.cached_tokens, done.own_cached_tokens) == (0, 3 * part, 3 * part)
    assert see(client, seen).text == answer.text


def test_what_stands_for_a_picture_is_not_the_picture(
    plane: ControlPlane, client: openai.OpenAI, pair: list[Engine]
) -> None:
    """The engine's placeholder tokens of a picture, sent as tokens, are another prompt to the engine, and to the keys."""
    start = fresh_words(96)
    ids = pair[0].tokenize({"prompt": start + fresh_words(90)})
    picture = pair[0].tokenize({"messages": [says(image(1, 2, 3))]})[HEAD : HEAD + IMAGE_TOKENS]
    head = pair[0].tokenize({"messages": [user(start)]})[: HEAD + 96]
    see(client, says(text(start), image(1, 2, 3), text(words(90, 1))))
    plane.wait_settled()
    answer = complete(client, head + picture + ids[96:], model=EYES)
    decision = plane.finished_decision(answer.decision_id)
    assert decision.key_count == len(head + picture + ids[96:]) // 16
    assert_agree(plane, answer, blocks(len(head)))


def test_text_alone_is_exact_in_parts_or_whole(plane: ControlPlane, client: openai.OpenAI) -> None:
    """A template that renders content parts, as those of vision models do, joins them without a newline."""
    one, two = fresh_words(100), fresh_words(100)
    first = see(client, user(one + two), session="parts")
    plane.wait_settled()
    again = see(client, says(text(one), text(two)), session="parts")
    assert (again.text, prompt_tokens(again)) == (first.text, prompt_tokens(first))
    assert_agree(plane, again, blocks(prompt_tokens(first) - 1))


def test_pictures_come_by_every_api(plane: ControlPlane, client: openai.OpenAI, pair: list[Engine]) -> None:
    """In the other APIs only the engine knows a picture's tokens, so requests have no keys; the engine's counts are reported."""
    url = image(255, 0, 255)["image_url"]["url"]
    source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    claude = {
        "max_tokens": 5,
        "messages": [{"role": "user", "content": [{"type": "image", "source": source}, text("hi")]}],
    }
    gpt = {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": url, "detail": "auto"}]}]}
    bodies: dict[str, dict[str, Any]] = {"/v1/messages": claude, "/v1/responses": gpt | {"max_output_tokens": 5}}
    for path, body in bodies.items():
        answer = ask(plane.gateway_url + path, {"model": EYES, **body})
        assert answer.status == 200, answer.text
        decision = plane.finished_decision(plane.newest_decision().decision_id)
        assert (decision.key_count, decision.outcome) == (0, fleet_pb2.DECISION_OUTCOME_OK)
        assert decision.finished.prompt_tokens > IMAGE_TOKENS


def test_a_picture_that_is_none_is_the_clients_error(plane: ControlPlane, client: openai.OpenAI) -> None:
    broken = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with pytest.raises(openai.BadRequestError):
        see(client, says(text("hi"), broken))
    assert see(client, says(text("hi"), image(9, 9, 9)), max_tokens=2).text


# ---- the embedding model ----


def test_texts_are_embedded_as_the_engine_does(plane: ControlPlane, client: openai.OpenAI, pair: list[Engine]) -> None:
    texts = [fresh_words(40), fresh_words(5), fresh_words(300)]
    raw = client.embeddings.with_raw_response.create(model=VECTORS, input=texts)
    answer = raw.parse()
    assert raw.headers["X-Pointsman-Instance"] == pair[1].instance_id
    with client_of(pair[1].url) as direct:
        own = direct.embeddings.create(model=VECTORS, input=texts)
    for ours, theirs in zip(answer.data, own.data, strict=True):
        assert ours.index == theirs.index
        assert ours.embedding == pytest.approx(theirs.embedding, abs=1e-4)
    decision = plane.finished_decision(raw.headers["X-Pointsman-Decision"])
    assert decision.outcome == fleet_pb2.DECISION_OUTCOME_OK
    assert decision.finished.prompt_tokens == answer.usage.prompt_tokens == 345
    assert (decision.key_count, decision.session_id) == (0, "")
    ids = pair[1].tokenize({"prompt": texts[0]})
    same = client.embeddings.create(model="vector", input=ids, encoding_format="float")
    assert same.data[0].embedding == pytest.approx(answer.data[0].embedding, abs=1e-4)


def test_texts_are_ranked_scored_and_pooled(plane: ControlPlane, pair: list[Engine]) -> None:
    one, two, three = (fresh_words(20) for _ in range(3))
    bodies: dict[str, dict[str, Any]] = {
        "/rerank": {"query": one, "documents": [two, one, three]},
        "/v1/rerank": {"query": one, "documents": [two, one], "top_n": 1},
        "/v2/rerank": {"query": one, "documents": [three, one]},
        "/score": {"text_1": one, "text_2": [one, two]},
        "/v1/score": {"text_1": one, "text_2": two},
        "/pooling": {"input": [one, two]},
    }
    for path, body in bodies.items():
        ours, theirs = (ask(url + path, {"model": VECTORS, **body}) for url in (plane.gateway_url, pair[1].url))
        assert ours.status == theirs.status == 200, ours.text
        our_answer, their_answer = ours.json(), theirs.json()
        assert our_answer["usage"] == their_answer["usage"]
        assert _figures(our_answer) == pytest.approx(_figures(their_answer), abs=1e-4)
        if "rerank" in path:
            assert our_answer["results"][0]["document"]["text"] == one


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling"])
def test_embeddings_in_bytes_are_the_engines(plane: ControlPlane, pair: list[Engine], path: str) -> None:
    body = {"model": VECTORS, "input": fresh_words(20), "encoding_format": "bytes", "embed_dtype": "float32"}
    ours, theirs = (ask(url + path, body) for url in (plane.gateway_url, pair[1].url))
    assert (ours.status, theirs.status) == (200, 200), ours.body[:200]
    assert struct.unpack(f"{len(ours.body) // 4}f", ours.body) == pytest.approx(
        struct.unpack(f"{len(theirs.body) // 4}f", theirs.body), abs=1e-4
    )


def _figures(answer: Any) -> list[float]:
    """All numbers that an answer has for its texts, in their order."""
    if isinstance(answer, dict):
        kept = [answer[name] for name in ("results", "data", "relevance_score", "score", "index") if name in answer]
        return [figure for value in kept for figure in _figures(value)]
    if isinstance(answer, list):
        return [figure for value in answer for figure in _figures(value)]
    return [float(answer)]


def test_each_model_has_its_own_apis(plane: ControlPlane, client: openai.OpenAI) -> None:
    assert {model.id for model in client.models.list()} == {EYES, VECTORS, "picture", "vector"}
    assert client.models.retrieve("vector").id == "vector"
    with pytest.raises(openai.NotFoundError, match="does not serve this API"):
        chat(client, [user("hi")], model=VECTORS)
    with pytest.raises(openai.NotFoundError, match="does not serve this API"):
        client.embeddings.create(model="picture", input="hi")
    # Only a classification model has this API.
    assert ask(plane.gateway_url + "/classify", {"model": VECTORS, "input": "hi"}).status == 404
    with pytest.raises(openai.BadRequestError):
        client.embeddings.create(model=VECTORS, input=fresh_words(4_200))
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="nobody", input="hi")
    assert chat(client, [user("hi")], model="picture", max_tokens=2).finish_reason == "length"


# ---- one trace ----


def test_the_engines_own_span_is_below_the_gateways(
    plane: ControlPlane, client: openai.OpenAI, collector: Collector
) -> None:
    place = SpanContext(0xE4914E, 0xABC, True)
    answer = see(client, user(fresh_words(50)), extra_headers={"traceparent": place.traceparent})
    spans = {span.name.split(" ", 1)[1]: span for span in collector.trace(f"{place.trace_id:032x}", 5)}
    request, ours, theirs = spans["POST /v1/chat/completions"], spans[f"chat {EYES}"], spans["llm_request"]
    assert [request.parent_id, theirs.parent_id] == [f"{place.span_id:016x}", ours.span_id]
    assert spans["decide"].attributes["pointsman.decision_id"] == answer.decision_id
    assert theirs.attributes["gen_ai.usage.prompt_tokens"] == ours.attributes["gen_ai.usage.input_tokens"]
    assert theirs.attributes["gen_ai.usage.completion_tokens"] == ours.attributes["gen_ai.usage.output_tokens"] == 16

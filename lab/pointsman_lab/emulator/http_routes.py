"""The emulated engine's HTTP routes, with vLLM's paths, requests and answers."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import time
import uuid
from array import array
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from functools import partial
from typing import Any, Protocol, TypeVar

from aiohttp import web

from pointsman_lab.emulator import anthropic_api, responses_api
from pointsman_lab.emulator import openai_api as api
from pointsman_lab.emulator.answer_records import with_comment
from pointsman_lab.emulator.engine_loop import EngineLoop, Stream
from pointsman_lab.emulator.mooncake_connector import KvTransfers
from pointsman_lab.emulator.openai_api import ApiError, GenerationParams
from pointsman_lab.emulator.scripted_answers import Piece, PieceReader, ScriptedAnswer, collected
from pointsman_lab.emulator.suspension import Suspension
from pointsman_lab.emulator.tool_choice import prepared_answer
from pointsman_lab.emulator.vllm_metrics import EngineMetrics
from pointsman_lab.engine.interface import EngineRequest
from pointsman_lab.engine.model import EngineModel
from pointsman_lab.workload.tokenizer import ChatTokenizer

VERSION = "0.32.0+emulated"
MAX_BODY_BYTES = 64 << 20
# Source: vLLM's AuthenticationMiddleware, GUARDED_PREFIX.
GUARDED = ("/v1", "/v2", "/inference", "/cohere")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
T = TypeVar("T")


class Api(Enum):
    """The APIs that generate text; the value is the prefix of an answer's id."""

    CHAT = "chatcmpl-"
    COMPLETION = "cmpl-"
    MESSAGES = "msg_"
    RESPONSES = "resp_"


class EventWriter(Protocol):
    """Writes the events of one streamed answer as bytes."""

    def start(self, prompt_tokens: int) -> bytes: ...
    def pieces(self, pieces: Sequence[Piece], reason: str) -> bytes: ...
    def failed(self, error: ApiError) -> bytes: ...
    def end(self, used: dict[str, Any], reason: str) -> bytes: ...


class EngineApp:
    """HTTP handlers over one engine loop. `created` is the model's creation time (s since the epoch); `script` has the answers to
    chats with tools; `root` is the weights' path or hub id (empty: the tokenizer's folder)."""

    def __init__(
        self,
        model_name: str,
        created: int,
        tokenizer: ChatTokenizer,
        model: EngineModel,
        loop: EngineLoop,
        metrics: EngineMetrics,
        event_source: Callable[[], dict[str, Any]],
        transfers: KvTransfers,
        suspension: Suspension,
        api_key: str = "",
        script: Sequence[ScriptedAnswer] = (),
        root: str = "",
    ) -> None:
        self._name = model_name
        self._created = created
        self._tokenizer = tokenizer
        self._model = model
        self._loop = loop
        self._metrics = metrics
        self._event_source = event_source
        self._transfers = transfers
        self._suspension = suspension
        self._api_key = api_key
        self._script = script
        self._root = root or str(tokenizer.folder)
        self._tokenizing = ThreadPoolExecutor(1, "tokenizing")
        self._texts = dict(zip(tokenizer.word_ids, tokenizer.words, strict=True))

    def make(self) -> web.Application:
        """Return the application."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_errors, self._authenticate])
        app.on_cleanup.append(self._stop_tokenizing)
        app.add_routes(
            [
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/completions", self._completions),
                web.post("/v1/messages", self._messages),
                web.post("/v1/messages/count_tokens", self._count_tokens),
                web.post("/v1/responses", self._responses),
                web.get("/v1/responses/{id}", self._stored_response),
                web.post("/v1/responses/{id}/cancel", self._stored_response),
                web.post("/v1/chat/completions/render", self._render_chat),
                web.post("/v1/completions/render", self._render_completion),
                web.get("/v1/models", self._models),
                web.get("/health", self._health),
                web.get("/version", self._version),
                web.get("/metrics", self._metrics_text),
                web.get("/kv_event_sources", self._sources),
                web.post("/tokenize", self._tokenize),
                web.post("/detokenize", self._detokenize),
                *self._suspension.routes(),
                web.get("/query", self._bootstrap),
                web.get("/emulated_transfers/{transfer_id}", self._transfer),
            ]
        )
        return app

    @web.middleware
    async def _authenticate(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Require the key as vLLM's --api-key does: for the APIs, not for /metrics and similar paths."""
        shown, wanted = request.headers.get("Authorization", "").encode(), f"Bearer {self._api_key}".encode()
        if self._api_key and request.path.startswith(GUARDED) and not hmac.compare_digest(shown, wanted):
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    async def _stored_response(self, request: web.Request) -> web.StreamResponse:
        raise ApiError(404, f"Response with id '{request.match_info['id']}' not found.", "response_id")

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, Api.CHAT)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, Api.COMPLETION)

    async def _messages(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, Api.MESSAGES)

    async def _responses(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, Api.RESPONSES)

    async def _generate(self, request: web.Request, kind: Api) -> web.StreamResponse:
        body = asked = api.parse_json(await request.read())
        if kind is Api.MESSAGES:
            body = anthropic_api.as_chat(asked)
        elif kind is Api.RESPONSES:
            body = responses_api.as_chat(asked)
        params = await self._params(body, request, chat=kind is not Api.COMPLETION)
        transfer = params.kv_transfer or {}
        remote, fetch = 0, None
        if transfer.get("do_remote_prefill"):
            remote, fetch = len(params.prompt), self._transfers.fetcher(transfer)
        given = asked.get("request_id") if kind is Api.RESPONSES else None
        unique = uuid.uuid4().hex
        # As in vLLM, a client chooses the id that it gets, and the engine's own is unique all the same.
        request_id = given if isinstance(given, str) else kind.value + request.headers.get("X-Request-ID", unique)
        prepared = self._prepared(body, params)
        reader = PieceReader(prepared, self._tokenizer) if prepared is not None else None
        ids = params.begun.ids if params.begun is not None and params.stream else ()
        if params.begun is not None and params.begun.complete and params.stream:
            return await self._rest_of_complete(request, kind, asked, params, request_id, prepared)
        stream = self._loop.open(
            EngineRequest(
                request_id=f"{request_id}-{unique}",
                prompt=[*params.prompt, *ids],
                begun=len(ids),
                max_tokens=params.max_tokens - len(ids),
                ignore_eos=params.ignore_eos and reader is None,
                session_id=params.session_id,
                cache_salt=params.cache_salt,
                remote_tokens=remote,
                priority=params.priority,
                answer=reader.ids if reader is not None else (),
            ),
            fetch,
        )
        try:
            if params.stream:
                writer = _event_writer(kind, asked, params, request_id, prepared)
                return await self._stream(request, writer, params, stream, reader)
            return await self._whole(kind, asked, params, request_id, stream, reader, prepared)
        finally:
            self._loop.close(stream)

    async def _params(self, body: dict[str, Any], request: web.Request, *, chat: bool) -> GenerationParams:
        return await self._in_tokenizing_thread(
            partial(
                api.parse_generation_params,
                body,
                request.headers.get("X-Session-ID", ""),
                chat=chat,
                served=self._name,
                tokenizer=self._tokenizer,
                max_model_len=self._model.config.max_model_len,
            )
        )

    async def _in_tokenizing_thread(self, call: Callable[[], T]) -> T:
        """Run what encodes a text, in order of arrival. As in vLLM, a long prompt delays other prompts, and no step."""
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, call)

    async def _stop_tokenizing(self, app: web.Application) -> None:
        del app
        self._tokenizing.shutdown(wait=False, cancel_futures=True)

    def _prepared(self, body: dict[str, Any], params: GenerationParams) -> ScriptedAnswer | None:
        """Return the prepared answer, or None for random words."""
        if not params.chat or not body.get("tools"):
            return None
        seed = f"{self._model.config.seed} {hashlib.sha256(array('L', params.prompt).tobytes()).hexdigest()}"
        return prepared_answer(self._script, body, params.tool_choice, seed, self._tokenizer.words)

    async def _whole(
        self,
        kind: Api,
        asked: dict[str, Any],
        params: GenerationParams,
        request_id: str,
        stream: Stream,
        reader: PieceReader | None,
        prepared: ScriptedAnswer | None,
    ) -> web.Response:
        tokens: list[int] = []
        while part := await stream.read():
            tokens += part
        transfer = params.kv_transfer or {}
        if transfer.get("do_remote_decode") and stream.reason == "length":
            # As in vLLM, a prefill that ends by a stop token transfers nothing.
            prefill_s = stream.first_at - stream.scheduled_at
            self._transfers.prefilled(str(transfer.get("transfer_id")), prefill_s)
        used = api.usage(len(params.prompt), stream.output_tokens, stream.cached_tokens)
        read = collected(self._pieces(tokens, reader), prepared)
        now = int(time.time())
        match kind:
            case Api.MESSAGES:
                body = anthropic_api.message(params, request_id, read, stream.reason, used)
            case Api.RESPONSES:
                body = responses_api.response(asked, params, request_id, now, read, stream.reason, used)
            case _:
                body = api.answer(params, request_id, now, read, stream.reason, used)
        return web.json_response(body)

    async def _stream(
        self,
        request: web.Request,
        writer: EventWriter,
        params: GenerationParams,
        stream: Stream,
        reader: PieceReader | None,
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        continued = params.begun
        before = list(continued.ids) if continued is not None else []
        if before:
            # The client has these events.
            writer.start(len(params.prompt))
            writer.pieces(self._pieces(before, reader), "")
        begun, first = bool(before), b":\n\n" if before else b""
        if continued is None and isinstance(writer, responses_api.ResponseEvents):
            # As vLLM does, before the prompt is computed.
            await response.write(writer.start(len(params.prompt)))
            begun = True
        waiting: list[int] = []
        try:
            while part := await stream.read():
                start = b"" if begun else writer.start(len(params.prompt))
                begun = True
                waiting += part
                if events := start + writer.pieces(self._pieces(part, reader), stream.reason):
                    if continued is not None:
                        events = first + with_comment(waiting, events, complete=stream.reason in ("stop", "length"))
                    await response.write(events)
                    first, waiting = b"", []
            cached = min(stream.cached_tokens, len(params.prompt))
            end = writer.end(api.usage(len(params.prompt), len(before) + stream.output_tokens, cached), stream.reason)
        except ApiError as error:
            end = writer.failed(error)
        await response.write(end)
        await response.write_eof()
        return response

    async def _rest_of_complete(
        self,
        request: web.Request,
        kind: Api,
        asked: dict[str, Any],
        params: GenerationParams,
        request_id: str,
        prepared: ScriptedAnswer | None,
    ) -> web.StreamResponse:
        """Answer with what follows an answer's last token: the usage, and the end of the stream."""
        assert params.begun is not None
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        used = api.usage(len(params.prompt), len(params.begun.ids), 0)
        writer = _event_writer(kind, asked, params, request_id, prepared)
        await response.write(b":\n\n" + writer.end(used, "stop"))
        await response.write_eof()
        return response

    def _pieces(self, tokens: list[int], reader: PieceReader | None) -> list[Piece]:
        if reader is not None:
            return reader.read(len(tokens))
        return [Piece(None, "".join([self._texts.get(token, "") for token in tokens]))]

    async def _models(self, request: web.Request) -> web.Response:
        card = {
            "id": self._name,
            "object": "model",
            "created": self._created,
            "owned_by": "vllm",
            "root": self._root,
            "parent": None,
            "max_model_len": self._model.config.max_model_len,
            "permission": [],
        }
        return web.json_response({"object": "list", "data": [card]})

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": VERSION})

    async def _metrics_text(self, request: web.Request) -> web.Response:
        return web.Response(
            body=self._metrics.text(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        )

    async def _sources(self, request: web.Request) -> web.Response:
        return web.json_response({"0": self._event_source()})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = api.parse_json(await request.read())
        api.check_model(body, self._name)
        if "messages" in body:
            tokens = await self._in_tokenizing_thread(partial(api.chat_tokens, body, self._tokenizer))
        elif isinstance(body.get("prompt"), str):
            tokens = await self._in_tokenizing_thread(partial(self._tokenizer.encode, body["prompt"]))
        else:
            raise ApiError(400, "prompt must be a text, or messages a list", "prompt")
        limit = self._model.config.max_model_len
        return web.json_response({"count": len(tokens), "max_model_len": limit, "tokens": tokens, "token_strs": None})

    async def _count_tokens(self, request: web.Request) -> web.Response:
        body = anthropic_api.as_chat(api.parse_json(await request.read()))
        api.check_model(body, self._name)
        tokens = await self._in_tokenizing_thread(partial(api.chat_tokens, body, self._tokenizer))
        return web.json_response(anthropic_api.token_count(len(tokens)))

    async def _render_chat(self, request: web.Request) -> web.Response:
        params = await self._params(api.parse_json(await request.read()), request, chat=True)
        return web.json_response(api.rendered(params, uuid.uuid4().hex))

    async def _render_completion(self, request: web.Request) -> web.Response:
        params = await self._params(api.parse_json(await request.read()), request, chat=False)
        return web.json_response([api.rendered(params, uuid.uuid4().hex)])

    async def _detokenize(self, request: web.Request) -> web.Response:
        body = api.parse_json(await request.read())
        api.check_model(body, self._name)
        tokens = api.completion_tokens({"prompt": body.get("tokens")}, self._tokenizer)
        return web.json_response({"prompt": self._tokenizer.decode(tokens)})

    async def _bootstrap(self, request: web.Request) -> web.Response:
        return web.json_response(self._transfers.bootstrap())

    async def _transfer(self, request: web.Request) -> web.Response:
        engine_id = request.query.get("engine_id", "")
        overlapped_s = await self._transfers.wait_for(request.match_info["transfer_id"], engine_id)
        return web.json_response({"overlapped_s": overlapped_s})


def _event_writer(
    kind: Api, asked: dict[str, Any], params: GenerationParams, request_id: str, prepared: ScriptedAnswer | None
) -> EventWriter:
    now = int(time.time())
    match kind:
        case Api.MESSAGES:
            return anthropic_api.MessageEvents(params, request_id, prepared)
        case Api.RESPONSES:
            return responses_api.ResponseEvents(asked, params, request_id, now, prepared)
        case _:
            return api.Chunks(params, request_id, now, prepared)


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ApiError as error:
        body = anthropic_api.error(error) if request.path.startswith("/v1/messages") else error.body()
        return web.json_response(body, status=error.status)
    except ConnectionResetError:
        if request.transport is not None and not request.transport.is_closing():
            raise
        # The client has disconnected before the handler could be cancelled. aiohttp would log an exception.
        return web.Response()
    except web.HTTPException as error:
        text = json.dumps({"detail": error.reason})
        return web.Response(text=text, status=error.status, content_type="application/json")

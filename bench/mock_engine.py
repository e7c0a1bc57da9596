"""Mock engine with little CPU cost, a separate program on bare uvloop, so that benchmarks do not measure the engine.

A chat or completion is answered with `max_tokens` chunks, one per `--interval-ms`, or with a small JSON object. /tokenize and
/render answer with the tokens of `--model`'s tokenizer: the gateway's tokenizer status is then EXACT, and vllm-router gets the
tokens that it routes by. GET /open returns the number of answers in flight. With `--tells` a stream whose ids are asked for tells
them, as an engine with the connector package does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import cast

import uvloop

from pointsman_gateway.core.tokens.model_tokenizer import ModelTokenizer
from pointsman_gateway.core.tokens.token_cache import TokenCache
from pointsman_gateway.io.tokenizer_files import find_tokenizer, load_tokenizer

# A conversation's next turn costs the engine little, so that a proxy that asks it for tokens does not wait long.
TOKEN_CACHE_BYTES = 64 << 20
_CHUNK = (
    b'data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1760000000,"model":"m",'
    b'"choices":[{"index":0,"delta":{"content":" word"},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'
)
_TEXT_CHUNK = (
    b'data: {"id":"cmpl-0123456789abcdef","object":"text_completion","created":1760000000,"model":"m",'
    b'"choices":[{"index":0,"text":" word","logprobs":null,"finish_reason":null}]}\n\n'
)
_USAGE = b'{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d,"prompt_tokens_details":%b}'
_HEAD = b"HTTP/1.1 %b\r\nserver: uvicorn\r\ncontent-type: %b\r\n%b\r\n\r\n"
_STREAM_HEAD = _HEAD % (b"200 OK", b"text/event-stream; charset=utf-8", b"transfer-encoding: chunked")


_TOLD = b":12345\n\n"


def _framed(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _unframed(chunks: bytes) -> bytes:
    """Return the data of whole chunks."""
    parts, at = [], 0
    while size := int(chunks[at : (line := chunks.index(b"\r\n", at))], 16):
        parts.append(chunks[line + 2 : line + 2 + size])
        at = line + 4 + size
    return b"".join(parts)


class Engine(asyncio.Protocol):
    """One connection. Its client must wait for each answer before it sends the next request."""

    open_answers = 0
    tokenizer: ModelTokenizer | None = None
    interval_s = 0.01
    tells = False
    # Of each prompt, as the usage tells them. Cached tokens are told only if they are given, as by a vLLM without
    # --enable-prompt-tokens-details: 0 of a session's later turns would contradict all that a router knows.
    prompt_tokens, cached_tokens = 1, 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._in = b""
        self._timer: asyncio.TimerHandle | None = None

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            Engine.open_answers -= 1

    def data_received(self, data: bytes) -> None:
        self._in += data
        end = self._in.find(b"\r\n\r\n")
        if end < 0:
            return
        head = self._in[:end].lower()
        if head.find(b"transfer-encoding: chunked") >= 0:
            if not self._in.endswith(b"0\r\n\r\n"):
                return
            body = _unframed(self._in[end + 4 :])
        else:
            at = head.find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            body = self._in[end + 4 : end + 4 + length]
            if len(body) < length:
                return
        self._in = b""
        self._answer(head.split(b" ", 2)[1], body)

    def _answer(self, path: bytes, raw: bytes) -> None:
        if path == b"/open":
            self._json(b'{"open":%d}' % Engine.open_answers)
        elif path == b"/tokenize":
            self._json(json.dumps({"tokens": self._tokens(json.loads(raw))}).encode())
        elif path.endswith(b"/chat/completions/render"):
            self._json(json.dumps({"token_ids": self._tokens(json.loads(raw))}).encode())
        elif not raw:
            self._json(b'{"object":"list","data":[{"id":"m","object":"model","max_model_len":131072}]}')
        else:
            try:
                body = json.loads(raw)
            except ValueError:
                self._json(b'{"error":{"message":"no JSON","code":400}}', b"400 Bad Request")
                return
            count = body.get("max_tokens", 1)
            if body.get("stream"):
                usage = bool((body.get("stream_options") or {}).get("include_usage"))
                self._transport.write(_STREAM_HEAD)
                Engine.open_answers += 1
                chunk = _CHUNK if path.endswith(b"/chat/completions") else _TEXT_CHUNK
                self._chunk = _framed(_TOLD + chunk if self.tells and "vllm_xargs" in body else chunk)
                self._timer = asyncio.get_running_loop().call_later(self.interval_s, self._next, count, count, usage)
            else:
                self._json(
                    b'{"id":"x","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":'
                    b'{"role":"assistant","content":" word"},"finish_reason":"length"}],"usage":'
                    + self._usage(1)
                    + b"}"
                )

    def _next(self, left: int, count: int, usage: bool) -> None:
        if left:
            self._transport.write(self._chunk)
            self._timer = asyncio.get_running_loop().call_later(self.interval_s, self._next, left - 1, count, usage)
            return
        self._timer = None
        Engine.open_answers -= 1
        if usage:
            self._transport.write(_framed(b'data: {"choices":[],"usage":' + self._usage(count) + b"}\n\n"))
        self._transport.write(_framed(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    def _usage(self, count: int) -> bytes:
        details = b'{"cached_tokens":%d}' % self.cached_tokens if self.cached_tokens else b"null"
        return _USAGE % (self.prompt_tokens, self.prompt_tokens + count, count, details)

    def _json(self, body: bytes, status: bytes = b"200 OK") -> None:
        self._transport.write(_HEAD % (status, b"application/json", b"content-length: %d" % len(body)) + body)

    def _tokens(self, body: dict[str, object]) -> list[int]:
        assert self.tokenizer is not None, "--model was not given"
        if "messages" in body:
            return self.tokenizer.chat(body)
        return self.tokenizer.text(str(body["prompt"]), add_special_tokens=body.get("add_special_tokens") is not False)


async def _serve(host: str, port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Engine, host, port, backlog=8192)
    print("serves", flush=True)
    async with server:
        await server.serve_forever()


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--interval-ms", type=float, default=10.0)
    parser.add_argument("--model", default="")
    parser.add_argument("--tells", action="store_true")
    parser.add_argument("--prompt-tokens", type=int, default=1)
    parser.add_argument("--cached-tokens", type=int, default=0)
    given = parser.parse_args()
    Engine.interval_s, Engine.tells = given.interval_ms / 1e3, given.tells
    Engine.prompt_tokens, Engine.cached_tokens = given.prompt_tokens, given.cached_tokens
    if given.model:
        Engine.tokenizer = load_tokenizer(find_tokenizer(given.model), TokenCache(TOKEN_CACHE_BYTES))
    uvloop.run(_serve(given.host, given.port))


if __name__ == "__main__":
    main()

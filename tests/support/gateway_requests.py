"""Requests to a gateway in front of fake engines, by plain HTTP and by the vendors' own clients."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import anthropic
import openai

from pointsman.router.v1 import placement_pb2
from pointsman_gateway.core.api import Endpoint
from tests.support.fakes.gateway_peers import MODEL, Stack

CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "set the points so that each train takes the right track"}],
}
LONG = {"model": MODEL, "messages": [{"role": "user", "content": "set the points " * 400}], "max_tokens": 4}
WORDS = "set the points so that each train takes the right track " * 3
MESSAGES: dict[str, Any] = {"model": MODEL, "max_tokens": 64, "messages": [{"role": "user", "content": WORDS}]}
RESPONSES: dict[str, Any] = {"model": MODEL, "input": WORDS}
BODIES: dict[Endpoint, dict[str, Any]] = {
    Endpoint.CHAT: {"model": MODEL, "messages": MESSAGES["messages"]},
    Endpoint.COMPLETION: {"model": MODEL, "prompt": WORDS},
    Endpoint.MESSAGES: MESSAGES,
    Endpoint.RESPONSES: RESPONSES,
    Endpoint.EMBEDDINGS: {"model": MODEL, "input": [WORDS, "b"]},
    Endpoint.RERANK: {"model": MODEL, "query": "a", "documents": ["b", "c"]},
    Endpoint.SCORE: {"model": MODEL, "text_1": "a", "text_2": ["b"]},
    Endpoint.POOLING: {"model": MODEL, "input": "a"},
    Endpoint.CLASSIFY: {"model": MODEL, "input": ["a", "b"]},
    Endpoint.COUNT_TOKENS: {"model": MODEL, "messages": MESSAGES["messages"]},
    Endpoint.TOKENIZE: {"model": MODEL, "prompt": "a"},
    Endpoint.DETOKENIZE: {"model": MODEL, "tokens": [1]},
}


async def post(up: Stack, path: str, **kwargs: Any) -> tuple[int, dict[str, Any], dict[str, str]]:
    async with aiohttp.ClientSession() as http, http.post(up.url + path, **kwargs) as answer:
        raw = await answer.read()
        return answer.status, json.loads(raw), dict(answer.headers)


@asynccontextmanager
async def claude(up: Stack, key: str = "none") -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=up.url, api_key=key, max_retries=0) as client:
        yield client


@asynccontextmanager
async def gpt(up: Stack, key: str = "none") -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{up.url}/v1", api_key=key, max_retries=0) as client:
        yield client


async def ask(up: Stack, path: str, body: object = None, **headers: str) -> tuple[int, Any]:
    method = "GET" if body is None else "POST"
    async with (
        aiohttp.ClientSession() as http,
        http.request(method, up.url + path, json=body, headers=headers) as answer,
    ):
        return answer.status, await answer.json(content_type=None)


async def finished(up: Stack, count: int = 1) -> placement_pb2.Finished:
    await up.router.until(lambda: len(up.router.finished) == count)
    return up.router.finished[-1]

"""Browsers at the gateway (CORS), and its liveness check."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest

from pointsman_gateway.core.cors import EXPOSED, CorsPolicy
from pointsman_gateway.io.main import serving
from pointsman_gateway.io.settings import GatewaySettings
from tests.support.fakes.gateway_peers import stack
from tests.support.gateway_requests import CHAT

ORIGIN = "https://app.example"
ASKED = "authorization,content-type,x-stainless-lang,anthropic-dangerous-direct-browser-access"
PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": ASKED}


async def test_a_listed_origins_pages_may_read_every_answer(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("acme:sk-1\n")
    async with stack(tmp_path, cors_origins=[ORIGIN, "http://localhost:3000"], api_keys_file=keys) as up:
        key = {"Authorization": "Bearer sk-1"}
        stream = CHAT | {"stream": True}
        wanted = [
            ("POST", "/v1/chat/completions", key, CHAT, 200),
            ("POST", "/v1/chat/completions", key, stream, 200),
            ("POST", "/v1/chat/completions", key, CHAT | {"model": "none"}, 404),
            ("POST", "/v1/chat/completions", {}, CHAT, 401),
            ("POST", "/v1/nothing", key, CHAT, 404),
            ("GET", "/v1/models", key, None, 200),
            ("GET", "/v1/chat/completions", key, None, 405),
            ("GET", "/v1/models", key | {"Expect": "something"}, None, 417),
        ]
        async with aiohttp.ClientSession() as http:
            for method, path, headers, body, status in wanted:
                for origin, named in ((ORIGIN, ORIGIN), ("https://evil.example", None), (None, None)):
                    sent = headers | ({"Origin": origin} if origin else {})
                    async with http.request(method, up.url + path, headers=sent, json=body) as answer:
                        await answer.read()
                        assert answer.status == status, path
                        assert answer.headers.get("Access-Control-Allow-Origin") == (named if status != 417 else None)
                        assert "Access-Control-Allow-Credentials" not in answer.headers
                        assert status == 417 or answer.headers["Vary"] == "Origin"
                        if named and status != 417:
                            exposed = answer.headers["Access-Control-Expose-Headers"].split(", ")
                            assert {"X-Request-ID", "Retry-After"} <= set(exposed) == set(EXPOSED)


async def test_a_preflight_needs_no_key_and_allows_what_official_clients_send(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("acme:sk-1\n")
    async with stack(tmp_path, cors_origins=[ORIGIN], api_keys_file=keys) as up, aiohttp.ClientSession() as http:
        url = f"{up.url}/v1/chat/completions"
        async with http.options(url, headers=PREFLIGHT | {"Origin": ORIGIN}) as answer:
            assert answer.status == 204
            assert answer.headers["Access-Control-Allow-Origin"] == ORIGIN
            assert answer.headers["Access-Control-Allow-Methods"] == "POST"
            assert answer.headers["Access-Control-Allow-Headers"] == ASKED
        for sent in (PREFLIGHT | {"Origin": "https://evil.example"}, {"Origin": "null"}, {}):
            async with http.options(url, headers=sent) as answer:
                assert answer.status == 204
                assert not [name for name in answer.headers if name.lower().startswith("access-control")]
                assert answer.headers["Allow"] == "POST, OPTIONS"


@pytest.mark.parametrize(
    ("listed", "allowed", "refused"),
    [
        ("*", ["null", "https://a.example", "vscode-webview://1f"], []),
        ("app://obsidian.md", ["app://obsidian.md"], ["app://obsidianxmd", "app://obsidian.md:1", "null", ""]),
        ("vscode-webview://*", ["vscode-webview://1f-2"], ["vscode-webview://", "vscode-webview://a/b", "http://1f-2"]),
        (
            "https://*.app.example",
            ["https://a.b.app.example"],
            ["https://app.example", "https://app.example.evil.example"],
        ),
        ("http://localhost:*", ["http://localhost:3000"], ["http://localhost", "http://localhost:3000.evil.example"]),
    ],
)
def test_patterns_of_origins(listed: str, allowed: list[str], refused: list[str]) -> None:
    policy = CorsPolicy(GatewaySettings(cors_origins=[listed]).cors_origins)
    for origin in allowed:
        assert policy.answer_fields(origin)["Access-Control-Allow-Origin"] == origin
    for origin in refused:
        assert "Access-Control-Allow-Origin" not in policy.answer_fields(origin), origin


async def test_without_the_setting_nothing_is_said_of_origins(tmp_path: Path) -> None:
    async with stack(tmp_path) as up, aiohttp.ClientSession() as http:
        for method in ("GET", "OPTIONS"):
            async with http.request(method, f"{up.url}/v1/models", headers=PREFLIGHT | {"Origin": ORIGIN}) as answer:
                assert "Access-Control-Allow-Origin" not in answer.headers
                assert "Vary" not in answer.headers


@pytest.mark.parametrize(
    "origin",
    ["null", "app.example", "https://app.example/", "https://*.example/", "HTTPS://A", "**", "*://app.example"],
)
def test_what_is_no_origin_cannot_be_listed(origin: str) -> None:
    with pytest.raises(ValueError, match="no origin"):
        GatewaySettings(cors_origins=[ORIGIN, origin])


async def test_a_gateway_lives_before_anybody_is_behind_it(tmp_path: Path) -> None:
    async with (
        serving(GatewaySettings(listen="127.0.0.1:0", routers=["127.0.0.1:1"], drain_timeout_s=0.1)) as (_, url),
        aiohttp.ClientSession() as http,
    ):
        for path, status in (("/livez", 200), ("/health", 503), ("/ready", 503)):
            async with http.get(url + path) as answer:
                assert answer.status == status
        async with http.head(f"{url}/livez") as answer:
            assert answer.status == 200

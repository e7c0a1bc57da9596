"""What clients' own code makes of the gateway's errors: what it makes of an engine's, or of OpenAI's and Anthropic's own.

Clients decide by the class of an error whether they send a request again, wait, or give up. A full context is tried with a real
engine (tests/engine/test_clients.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from pointsman_gateway.core.api import Endpoint
from tests.support.clients.programs import Case, asked
from tests.support.clients.servers import prompt_of, providers, stack_by_prompt
from tests.support.fakes.gateway_peers import MODEL
from tests.support.gateway_requests import BODIES, post

pytestmark = pytest.mark.timeout(400)

KEYS = "busy:sk-busy\noutage:sk-outage\nrate:sk-rate tokens_per_minute=1\nwell:sk-well\n"
# Anthropic has a status of its own for an overload, 529. The gateway answers 503 as to other APIs, which proxies know; clients
# send both again.
OVERLOADED = {"OverloadedError": "ServiceUnavailableError", "AnthropicOverloadedError": "AnthropicAPIError"}


async def test_clients_see_what_they_would_see_without_the_gateway(tmp_path: Path) -> None:
    async with stack_by_prompt(tmp_path, KEYS) as up, providers() as provider:
        # It takes what its key has.
        chat = BODIES[Endpoint.CHAT] | {"messages": [{"role": "user", "content": prompt_of("well")}]}
        assert (await post(up, Endpoint.CHAT.value, json=chat, headers={"Authorization": "Bearer sk-rate"}))[0] == 200
        cases: list[Case] = []
        for stream in (False, True):
            for word in ("well", "bad", "error", *(["cut"] if stream else [])):
                for at, url in (("there", up.engines[0].url), ("here", up.url)):
                    name = f"{word} {stream} {at}"
                    cases.append(Case(name, url, "sk-well", MODEL, prompt_of(word), stream))
            for word in ("rate", "busy", "outage"):
                for at, url in (("there", f"{provider.url}/{word}"), ("here", up.url)):
                    cases.append(Case(f"{word} {stream} {at}", url, f"sk-{word}", MODEL, prompt_of("well"), stream))
        found = await asked(cases)
    differing = {}
    for (client, case), saw in found.items():
        name, _, at = case.rpartition(" ")
        if at == "here":
            there = found[client, f"{name} there"]
            # A broken connection and an error in a stream have classes of their own.
            same = saw != "answer" if name.startswith("cut") else saw == OVERLOADED.get(there, there)
            if not same:
                differing[client, name] = there, saw
    assert not differing
    assert {saw for (_, case), saw in found.items() if case.startswith("well")} == {"answer"}
    assert "answer" not in {saw for (_, case), saw in found.items() if not case.startswith(("well", "cut"))}
    assert len(found) == 14 * len(cases)

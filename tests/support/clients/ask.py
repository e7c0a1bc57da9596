"""Asks servers through Python clients, and prints what each client makes of the answers. Runs in .venv-clients.

Reads JSON from standard input: a list of {"case", "url" (without /v1), "key", "model", "prompt", "stream"}. Prints a list of
{"client", "case", "saw"}: the name of the exception that the client raises, or "answer".
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

# Without it litellm asks a server for its table of models' prices.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

anthropic: Any = import_module("anthropic")
litellm: Any = import_module("litellm")
langchain_anthropic: Any = import_module("langchain_anthropic")
langchain_openai: Any = import_module("langchain_openai")
openai: Any = import_module("openai")

Case = dict[str, Any]


def _read(answer: Any, case: Case) -> None:
    if case["stream"]:
        for _ in answer:
            pass


def _messages(case: Case) -> list[dict[str, str]]:
    return [{"role": "user", "content": case["prompt"]}]


def openai_chat(case: Case) -> None:
    client = openai.OpenAI(base_url=f"{case['url']}/v1", api_key=case["key"], max_retries=0)
    _read(
        client.chat.completions.create(
            model=case["model"], messages=_messages(case), max_tokens=4, stream=case["stream"]
        ),
        case,
    )


class ResponseFailed(Exception):
    """A stream of the Responses API told a failure as an event, which the client passes on."""


def openai_responses(case: Case) -> None:
    client = openai.OpenAI(base_url=f"{case['url']}/v1", api_key=case["key"], max_retries=0)
    answer = client.responses.create(
        model=case["model"], input=case["prompt"], max_output_tokens=16, stream=case["stream"]
    )
    for event in answer if case["stream"] else ():
        if event.type in ("error", "response.failed"):
            raise ResponseFailed


def anthropic_messages(case: Case) -> None:
    client = anthropic.Anthropic(base_url=case["url"], api_key=case["key"], max_retries=0)
    _read(
        client.messages.create(model=case["model"], messages=_messages(case), max_tokens=4, stream=case["stream"]), case
    )


def _litellm(route: str, case: Case) -> None:
    base = case["url"] if route == "anthropic" else f"{case['url']}/v1"
    answer = litellm.completion(
        model=f"{route}/{case['model']}",
        messages=_messages(case),
        api_base=base,
        api_key=case["key"],
        max_tokens=4,
        stream=case["stream"],
        num_retries=0,
        max_retries=0,
    )
    _read(answer, case)


def _langchain(model: Any, case: Case) -> None:
    if case["stream"]:
        for _ in model.stream(case["prompt"]):
            pass
    else:
        model.invoke(case["prompt"])


def langchain_chat(case: Case) -> None:
    base = f"{case['url']}/v1"
    _langchain(
        langchain_openai.ChatOpenAI(
            base_url=base, api_key=case["key"], model=case["model"], max_tokens=4, max_retries=0
        ),
        case,
    )


def langchain_messages(case: Case) -> None:
    _langchain(
        langchain_anthropic.ChatAnthropic(
            base_url=case["url"], api_key=case["key"], model=case["model"], max_tokens=4, max_retries=0
        ),
        case,
    )


CLIENTS: dict[str, Callable[[Case], None]] = {
    "openai chat": openai_chat,
    "openai responses": openai_responses,
    "anthropic": anthropic_messages,
    "litellm openai": lambda case: _litellm("openai", case),
    "litellm hosted_vllm": lambda case: _litellm("hosted_vllm", case),
    "litellm anthropic": lambda case: _litellm("anthropic", case),
    "langchain openai": langchain_chat,
    "langchain anthropic": langchain_messages,
}


def saw(ask: Callable[[Case], None], case: Case) -> str:
    """Return what a client makes of the answer."""
    try:
        ask(case)
    except Exception as error:
        return type(error).__name__
    return "answer"


def main(cases: Iterable[Case]) -> None:
    """Print what each client sees in each case."""
    litellm.suppress_debug_info = True
    found = [
        {"client": name, "case": case["case"], "saw": saw(ask, case)} for case in cases for name, ask in CLIENTS.items()
    ]
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(json.load(sys.stdin))

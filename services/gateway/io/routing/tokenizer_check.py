"""Compares a tokenizer with an engine's: a handful of probes through its /tokenize, id by id."""

from __future__ import annotations

from pointsman.gateway.core.tokens.chat_template import Unrenderable
from pointsman.gateway.core.tokens.model_tokenizer import ModelTokenizer
from pointsman.gateway.core.tokens.tokenizer_probes import CHATS, TEXTS
from pointsman.gateway.io.engines.engine_client import Upstream

PROBE_S = 10.0


async def first_difference(upstream: Upstream, url: str, model: str, tokenizer: ModelTokenizer) -> str:
    """The first probe on which `tokenizer` and the engine at `url` disagree, in words; empty when they agree on all.

    A chat that both refuse counts as agreement. Raises UpstreamError when the engine cannot be asked.
    """
    for at, text in enumerate(TEXTS):
        for special in (True, False):
            body = {"model": model, "prompt": text, "add_special_tokens": special}
            ours: list[int] | None = tokenizer.text(text, add_special_tokens=special)
            if ours != await upstream.tokenize(url, body, PROBE_S):
                return f"text probe {at} (add_special_tokens={str(special).lower()}) differs"
    for at, chat in enumerate(CHATS):
        theirs = await upstream.tokenize(url, {"model": model, **chat}, PROBE_S)
        try:
            ours = tokenizer.chat(chat)
        except Unrenderable:
            ours = None
        if ours != theirs and ours is not None:
            return f"chat probe {at} differs"
    return ""

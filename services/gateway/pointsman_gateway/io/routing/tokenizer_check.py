"""Compares a tokenizer with an engine's: sends a few probes to /tokenize and compares the token ids."""

from __future__ import annotations

from pointsman_gateway.core.tokens.model_tokenizer import ModelTokenizer
from pointsman_gateway.core.tokens.render_budget import Unrenderable
from pointsman_gateway.core.tokens.tokenizer_probes import CHATS, TEXTS
from pointsman_gateway.io.engines.engine_client import Upstream

# Timeout of one probe, s.
PROBE_S = 10.0


async def first_difference(upstream: Upstream, url: str, model: str, tokenizer: ModelTokenizer) -> str:
    """Return a description of the first probe on which `tokenizer` and the engine at `url` differ; empty if all are equal.

    A chat that `tokenizer` refuses counts as equal. Raises UpstreamError if the engine cannot be reached.
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

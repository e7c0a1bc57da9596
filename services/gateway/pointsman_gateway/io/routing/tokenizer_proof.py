"""Compares the tokens of `fastokens` with those of `tokenizers` in the background, as long as a tokenizer is in use."""

from __future__ import annotations

import threading
import time
from weakref import ref

from pointsman_gateway.core.tokens.model_tokenizer import ModelTokenizer
from pointsman_gateway.core.tokens.tokenizer_probes import more_texts

# What comparing texts takes of the process's CPU time, and of one core if the process is idle.
SHARE = 1 / 50
IDLE_SHARE = 1 / 500
# Pause between comparisons of prompts, s.
PROMPTS_S = 60.0


def prove(loaded: ref[ModelTokenizer], ended: threading.Event) -> bool:
    """Compare many texts, and then a part of a prompt each minute. Blocks until there is a difference, and returns False, or the
    tokenizer is in use no longer or `ended` is set."""
    texts = None
    began, used = time.monotonic(), time.process_time()
    while (tokenizer := loaded()) is not None:
        if texts is None:
            texts = more_texts(tokenizer.added_tokens())
        started = time.thread_time()
        text = next(texts, None)
        equal = tokenizer.prove_by_prompt() if text is None else tokenizer.prove([text])
        del tokenizer
        if not equal:
            return False
        # A busy gateway shows a difference to many requests, and looks for it faster.
        now, by_now = time.monotonic(), time.process_time()
        busy = min(1.0, (by_now - used) / max(now - began, 1e-6))
        began, used = now, by_now
        pause_s = (time.thread_time() - started) / max(IDLE_SHARE, SHARE * busy)
        if ended.wait(PROMPTS_S if text is None else pause_s):
            break
    return True

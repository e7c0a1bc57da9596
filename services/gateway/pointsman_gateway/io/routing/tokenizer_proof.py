"""Compares the tokens of `fastokens` with those of `tokenizers` in the background, as long as a tokenizer is in use."""

from __future__ import annotations

import threading
import time
from weakref import ref

from pointsman_gateway.core.tokens.model_tokenizer import ModelTokenizer
from pointsman_gateway.core.tokens.tokenizer_probes import more_texts

# Pause after a comparison by its CPU time: comparing takes a fiftieth of a core, for some minutes.
PAUSE_SHARE = 49
# Pause between comparisons of prompts, s.
PROMPTS_S = 60.0


def prove(loaded: ref[ModelTokenizer], ended: threading.Event) -> bool:
    """Compare many texts, and then a part of a prompt each minute. Blocks until there is a difference, and returns False, or the
    tokenizer is in use no longer or `ended` is set."""
    texts = None
    while (tokenizer := loaded()) is not None:
        if texts is None:
            texts = more_texts(tokenizer.added_tokens())
        started = time.thread_time()
        text = next(texts, None)
        equal = tokenizer.prove_by_prompt() if text is None else tokenizer.prove([text])
        del tokenizer
        if not equal:
            return False
        if ended.wait(PROMPTS_S if text is None else PAUSE_SHARE * (time.thread_time() - started)):
            break
    return True

"""Versions of vLLM: which one is tested, and what is off with others. Pure.

docs/vllm_versions.md tells how each statement is known. Behaviour depends on a version only where an engine shows nothing
before it is too late: whose KV it can read, and how it counts a limit of output tokens.
"""

from __future__ import annotations

import re

TESTED = "0.32"
# What is off with the versions from the first up to, but without, the second one; None: no limit.
_OFF: tuple[tuple[tuple[int, int] | None, tuple[int, int] | None, str], ...] = (
    (None, (0, 30), "KV events only with their addresses given to the agent (events=, replay=)"),
    (None, (0, 32), "layer-wise push refuses to start"),
    (
        (0, 33),
        None,
        "layer-wise push refuses to start; with EAGLE-type speculation the last known block does not count as cached",
    ),
)


def series(version: str) -> str:
    """Return the first two numbers of a version ("0.32" of "0.32.1+cpu"); the whole text if it does not begin with them."""
    found = _numbers(version)
    return f"{found[0]}.{found[1]}" if found else version


def counts_output(version: str) -> bool:
    """Return whether an engine refuses a request whose prompt and limit of output tokens together pass its context, as vLLM up to
    0.31 does. An unknown version is taken for a newer one, which shortens the output."""
    found = _numbers(version)
    return found is not None and found < (0, 32)


def fits_context(prompt_tokens: int, output_tokens: int, context_tokens: int, counts_output: bool) -> bool:
    """Return whether an engine with a context of so many tokens (0: unknown) takes a prompt with a limit of output tokens (0:
    none). Unless `counts_output` it shortens the output to what the prompt leaves, and refuses only a limit above the whole
    context."""
    room = context_tokens - (prompt_tokens if counts_output else 0)
    return not context_tokens or (prompt_tokens < context_tokens and output_tokens <= room)


def standing(version: str) -> str:
    """Return how a version stands to the tested one, and what is off with it, for people; empty for the tested one and for an
    unknown version."""
    found = _numbers(version)
    tested = _numbers(TESTED)
    if found is None or tested is None or found == tested:
        return ""
    off = [text for first, end, text in _OFF if (first is None or first <= found) and (end is None or found < end)]
    return f"{'older' if found < tested else 'newer'} than the tested {TESTED}: {'; '.join(off)}"


def _numbers(version: str) -> tuple[int, int] | None:
    found = re.match(r"(\d+)\.(\d+)(?!\d)", version)
    return (int(found[1]), int(found[2])) if found else None

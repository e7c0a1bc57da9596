"""Where a model's or a tokenizer's files are from: a hub id with the loaded revision, or a folder."""

from __future__ import annotations

import re
from pathlib import Path

# Path of a model in huggingface_hub's cache. In offline mode vLLM replaces the model's name with this path.
_KEPT = re.compile(r"(?:.*/)?models--([^/]+)/snapshots/([^/]+)/?")


def place_of(place: str, revision: object) -> tuple[str, str]:
    """Return the hub id or folder, and the loaded revision.

    The revision is a commit if vLLM could resolve it, else the configured one. It is empty for a folder, and if none is
    configured."""
    if (kept := _KEPT.fullmatch(place)) is not None:
        return kept[1].replace("--", "/"), kept[2]
    return place, "" if Path(place).exists() else revision_of(revision)


def revision_of(revision: object) -> str:
    """Return a configured revision, as the commit if vLLM could resolve it; "" without one."""
    # huggingface_hub's ResolvedRevision is a str of the configured revision, with the commit as an attribute.
    return str(getattr(revision, "resolved", None) or revision or "")

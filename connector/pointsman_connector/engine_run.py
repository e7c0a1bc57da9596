"""The id of one run of an engine, which its API servers and its engine cores share. Pure, except for the environment."""

from __future__ import annotations

import os
import secrets

# Environment variable with the id. Processes inherit it from the first process of the engine.
_RUN = "POINTSMAN_ENGINE_RUN"


def engine_run() -> str:
    """Return the id of this engine's run. The first call in an engine's first process chooses it."""
    return os.environ.setdefault(_RUN, secrets.token_hex(8))

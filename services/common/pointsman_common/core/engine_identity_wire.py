"""Engines' identities as messages. Pure."""

from __future__ import annotations

from functools import lru_cache

from msgspec.structs import asdict

from pointsman.agent.v1 import agent_pb2
from pointsman_common.core.engine_identity import UNKNOWN_IDENTITY, EngineIdentity


def identity_of(wire: agent_pb2.EngineIdentity) -> EngineIdentity:
    """Return an engine's identity. Equal ones are the same object, which most comparisons end at."""
    return _interned(wire.SerializeToString(deterministic=True))


@lru_cache(1_000)
def _interned(wire: bytes) -> EngineIdentity:
    message = agent_pb2.EngineIdentity.FromString(wire)
    return EngineIdentity(**{name: getattr(message, name) for name in EngineIdentity.__struct_fields__})


@lru_cache(1_000)
def identity_to_wire(known: EngineIdentity) -> agent_pb2.EngineIdentity | None:
    """The inverse of `identity_of`, not to be changed; None if nothing is known."""
    return None if known == UNKNOWN_IDENTITY else agent_pb2.EngineIdentity(**asdict(known))

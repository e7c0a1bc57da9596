"""What makes two engines interchangeable: their weights, types, overrides and tokenizers, as far as they are known. Pure.

A field is "" if it is unknown. Two engines are compatible unless something that is known of both differs: an unknown field equals
every value. So the relation is reflexive and symmetric, but not transitive.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Protocol

import msgspec

# Resolved types of a KV cache without quantisation, one of which an engine has that only says "auto".
_PLAIN_TYPES = frozenset({"float16", "bfloat16", "float32"})
AUTO = "auto"


class Use(StrEnum):
    """What two engines must be equal for: to read the same token ids (TOKENS), to go on with each other's answers (ANSWER), or
    to read each other's KV (KV). Each demands what the one before does, and more."""

    TOKENS = "TOKENS"
    ANSWER = "ANSWER"
    KV = "KV"


class Identity(Protocol):
    """The fields of an identity, as EngineIdentity and the message of this name have them."""

    @property
    def weights(self) -> str: ...
    @property
    def revision(self) -> str: ...
    @property
    def weights_digest(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def quantization(self) -> str: ...
    @property
    def overrides(self) -> str: ...
    @property
    def tokenizer(self) -> str: ...
    @property
    def tokenizer_digest(self) -> str: ...
    @property
    def kv_dtype(self) -> str: ...
    @property
    def kv_layout(self) -> str: ...


class EngineIdentity(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """What is known of an engine, "" where nothing is. Types are those in use, not those of its flags."""

    weights: str = ""  # hub id or path of the weights, without revision
    revision: str = ""  # of the weights at the hub: a commit if it is known
    weights_digest: str = ""  # of the files of the weights; decides where both engines have one, wherever the files are
    dtype: str = ""  # of the weights and activations: bfloat16, float16
    quantization: str = ""  # method; "none" without one
    overrides: str = ""  # digest of what overrides the model's own configuration; "none" without any
    tokenizer: str = ""  # hub id or path of the tokenizer, without revision
    tokenizer_digest: str = ""  # of its files; decides where both engines have one
    kv_dtype: str = ""  # of the KV cache's elements; "auto": the weights' type, whichever that is
    kv_layout: str = ""  # order of the KV cache's dimensions: NHD, HND


UNKNOWN_IDENTITY = EngineIdentity()


def differences(one: Identity, other: Identity, use: Use = Use.KV) -> tuple[str, ...]:
    """Return what two engines are known to differ in, of what `use` demands: names of fields, in a fixed order."""
    if one is other or one == other:
        return ()
    found = []
    if _differ(one.tokenizer_digest, other.tokenizer_digest, one.tokenizer, other.tokenizer):
        found.append("tokenizer")
    if use is Use.TOKENS:
        return tuple(found)
    if _differ(one.weights_digest, other.weights_digest, one.weights, other.weights):
        found.append("weights")
    elif not (one.weights_digest and other.weights_digest) and _differ("", "", one.revision, other.revision):
        found.append("revision")
    found += [
        name
        for name, mine, theirs in (
            ("dtype", one.dtype, other.dtype),
            ("quantization", one.quantization, other.quantization),
            ("overrides", one.overrides, other.overrides),
        )
        if mine and theirs and mine != theirs
    ]
    if _types_differ(one.kv_dtype, other.kv_dtype):
        found.append("kv_dtype")
    if use is Use.KV and one.kv_layout and other.kv_layout and one.kv_layout != other.kv_layout:
        found.append("kv_layout")
    return tuple(found)


def compatible(one: Identity, other: Identity, use: Use) -> bool:
    """Return whether nothing that `use` demands is known to differ between two engines."""
    return not differences(one, other, use)


def merged(one: EngineIdentity, other: EngineIdentity) -> EngineIdentity:
    """Return what is known of two compatible engines together."""
    if one == other or other == UNKNOWN_IDENTITY:
        return one
    names = EngineIdentity.__struct_fields__
    return EngineIdentity(**{name: getattr(one, name) or getattr(other, name) for name in names})


def words(name: str, one: Identity, other: Identity) -> str:
    """Return both values of a field that differs, for people."""
    values: Mapping[str, str] = {"weights": "weights_digest", "tokenizer": "tokenizer_digest"}
    mine, theirs = getattr(one, name), getattr(other, name)
    if mine == theirs and (digest := values.get(name)):
        mine, theirs = f"{mine} ({getattr(one, digest)})", f"{theirs} ({getattr(other, digest)})"
    return f"{name} {mine} and {theirs}"


def _differ(digest: str, other_digest: str, place: str, other_place: str) -> bool:
    """Return whether digests of files, or the places that the files are from where one digest is unknown, are known to differ."""
    if digest and other_digest:
        return digest != other_digest
    return bool(place and other_place) and place != other_place


def _types_differ(one: str, other: str) -> bool:
    if not one or not other or one == other:
        return False
    return not (AUTO in (one, other) and {one, other} <= _PLAIN_TYPES | {AUTO})

"""What the instances of a pool differ in, for people: their identities and limits. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TypeVar

from msgspec import UNSET

from pointsman_common.core.engine_identity import differences, words
from pointsman_router.core.placement_types import NO_TRAITS, EngineTraits, InstanceInfo

T = TypeVar("T")

_LIMITS = (("max_model_len", "context of {} tokens"), ("max_num_seqs", "batch of {} requests"))


def common_traits(infos: Iterable[InstanceInfo]) -> EngineTraits:
    """Return the identity of the most instances, and each limit of the most instances, of those that are known."""
    known = [traits for info in infos if (traits := info.traits) is not UNSET]
    limits = {name: most([value for traits in known if (value := getattr(traits, name))], 0) for name, _ in _LIMITS}
    return EngineTraits(most([traits.identity for traits in known], NO_TRAITS.identity), **limits)


def differing(info: InstanceInfo, common: EngineTraits) -> dict[str, str]:
    """Return what an instance differs in from `common`: name -> both values in words."""
    if (traits := info.traits) is UNSET or traits == common:
        return {}
    found = {
        name: words(name, traits.identity, common.identity) for name in differences(traits.identity, common.identity)
    }
    for name, said in _LIMITS:
        mine, theirs = getattr(traits, name), getattr(common, name)
        if mine and theirs and mine != theirs:
            found[name] = f"{said.format(mine)} and {theirs}"
    return found


def most(values: Iterable[T], default: T) -> T:
    """Return the value that occurs most often, of equal ones the first in the order of their texts, whatever the order of the
    instances."""
    counts = Counter(values)
    return min(counts, key=lambda value: (-counts[value], str(value)), default=default)

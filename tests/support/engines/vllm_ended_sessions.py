"""vLLM's CPU offloading manager with a cache policy, without an engine: which chunks of prompts it still has.

A module for inside_vllm.py. Requests follow one another as in vLLM's scheduler: look up, load, store, finish.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from pointsman_connector.ended_first import SESSION_END

POLICIES = {"lru": ("lru", None), "ended_first": ("EndedFirst", "pointsman_connector.ended_first")}


class Chunks:
    """A manager of `chunks` chunks. Keys of chunks are words here."""

    def __init__(self, policy: str, chunks: int) -> None:
        name, module = POLICIES[policy]
        self.manager = CPUOffloadingManager(chunks, name, module, enable_events=True)
        self.open: dict[str, tuple[ReqContext, list[bytes], list[bytes]]] = {}

    def begin(self, name: str, words: list[str], last: bool) -> int:
        """Begin a request: load the leading chunks that are there, and begin to store the others. Return the number of loaded
        ones."""
        manager, keys = self.manager, [make_offload_key(word.encode(), 0) for word in words]
        context = ReqContext(name, {SESSION_END: True} if last else None)
        manager.on_new_request(context)
        loaded: list[bytes] = []
        for key in keys:
            if manager.lookup(key, context) is not LookupResult.HIT:
                break
            loaded.append(key)
        manager.prepare_load(loaded, context)
        stored = manager.prepare_store(keys, context)
        self.open[name] = (context, loaded, stored.keys_to_store if stored is not None else [])
        return len(loaded)

    def end(self, name: str, stored: bool = True) -> None:
        """End a request and its transfers; `stored`: whether its store succeeds."""
        context, loaded, stores = self.open.pop(name)
        self.manager.complete_load(loaded, context)
        self.manager.on_request_finished(context)
        self.manager.complete_store(stores, context, stored)

    def kept(self, words: list[str]) -> list[str]:
        """Return those of the chunks that are there."""
        return [word for word in words if self.manager._policy.get(make_offload_key(word.encode(), 0)) is not None]


def hits(policy: str, chunks: int, requests: list[dict[str, Any]]) -> list[int]:
    """Return the number of loaded chunks of each request, one after another."""
    store = Chunks(policy, chunks)
    found = []
    for number, request in enumerate(requests):
        found.append(store.begin(str(number), request["words"], request["last"]))
        store.end(str(number))
    return found


def story(policy: str, chunks: int, actions: list[list[Any]], words: list[str]) -> list[Any]:
    """Return, after each action (begin, end, reset), the chunks that are there and the chunks in use."""
    store = Chunks(policy, chunks)
    states = []
    for kind, *rest in actions:
        if kind == "reset":
            store.manager.reset_cache()
            store.open.clear()
        else:
            getattr(store, kind)(*rest)
        in_use = {key[:-4].decode() for _, loaded, stores in store.open.values() for key in (*loaded, *stores)}
        events = [[event.removed, [key[:-4].decode() for key in event.keys]] for event in store.manager.take_events()]
        own = getattr(store.manager._policy, "_own", ())
        states.append({"kept": store.kept(words), "in_use": sorted(in_use), "events": events, "own": len(own)})
    return states

"""The doctor's checks of KV transfers: whether engines can transfer KV, and whether answers from transferred KV are right."""

from __future__ import annotations

import itertools
import json
import random
import secrets
import urllib.error
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any, NamedTuple

from pointsman.agent.v1 import agent_pb2
from pointsman_cli.doctor_findings import ASKED_AT_ONCE, TIMEOUT_S, EngineAccess, Finding, complete
from pointsman_common.core.engine_identity import EngineIdentity, Use, compatible
from pointsman_common.core.kv_transfer_params import mooncake_fetch, mooncake_send, nixl_send
from pointsman_common.io.direct_http import open_directly
from pointsman_router.core.instances.kv_refusals import refused_senders
from pointsman_router.io.convert import instance_and_load_messages

# Tokens of an answer that is compared.
ANSWER_TOKENS = 8
# Greedy answers of two correct computations can differ where the two best tokens have almost the same log probability. Up to this
# difference, in nats, another token is not an error. SHIFT: difference of one token's log probability in both answers, in nats,
# from which the model has read other KV; correct computations differ by some hundredths.
TIE, SHIFT = 0.1, 0.5
# Prompts after which answers that differ are an error. A pair whose first answer is equal is not checked again.
PROMPTS = 3
# Timeout of an answer that is compared, s: it waits in the engine's queue, and for the first handshake between two engines.
ANSWER_S = 60.0
# Words of a prompt: several blocks, the last one partial.
WORDS = 150
# Maximum number of pairs of a model whose answers are compared. Each costs two prefills of a few hundred tokens.
MAX_PAIRS = 32


def transfers(pool: list[agent_pb2.Instance]) -> Iterator[Finding]:
    """Yield whether the instances of a pool that have a KV connector can transfer KV."""
    able = [instance for instance in pool if instance.kv_transfer.protocol]
    refused = refused_senders(instance_and_load_messages.instance_info(instance) for instance in able)
    sides = list(map(_Side.of, able))
    # Most instances are alike, so there are few different sides, even of a thousand instances.
    counts = Counter(sides)
    with ThreadPoolExecutor(ASKED_AT_ONCE) as threads:
        bootstraps = threads.map(_bootstrap_problem, able)
        for instance, side, bootstrap in zip(able, sides, bootstraps, strict=True):
            name = f"{instance.instance_id} KV transfer"
            for sender in refused.get(instance.instance_id, ()):
                yield Finding(
                    Finding.FAIL,
                    name,
                    f"KV from {sender} was wrong (it was not used)",
                    "compare the two engines' versions, flags and --block-size; restart the sender to let it send again, or "
                    "the receiver if the sender keeps its engine id",
                )
            yield _transfer(name, instance, side, counts, bootstrap)


def _transfer(
    name: str, instance: agent_pb2.Instance, side: _Side, counts: Mapping[_Side, int], bootstrap: str
) -> Finding:
    """Return whether an instance with a KV connector can transfer KV. `counts`: how many of its pool have each side; `bootstrap`:
    why its bootstrap server does not answer."""
    itself = side.passes_to(side)
    receivers = sum(count for other, count in counts.items() if side.passes_to(other)) - itself
    senders = sum(count for other, count in counts.items() if other.passes_to(side)) - itself
    if not receivers and not senders:
        return Finding(
            Finding.WARN,
            name,
            "no other instance of its model can transfer KV with it",
            "give both the same vLLM, model, types, protocol and --block-size, and opposite roles (or the role both)",
        )
    if bootstrap:
        return Finding(
            Finding.FAIL,
            name,
            f"its bootstrap server does not answer: {bootstrap}",
            "give the engine a unique VLLM_MOONCAKE_BOOTSTRAP_PORT, and the agent its address (bootstrap=)",
        )
    return Finding(
        Finding.OK,
        name,
        f"can send KV to {receivers} instances",
        "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT=60 frees KV that is not fetched after 60 s instead of 480 s"
        if instance.kv_transfer.protocol == agent_pb2.KV_PROTOCOL_MOONCAKE
        else "",
    )


def _bootstrap_problem(instance: agent_pb2.Instance) -> str:
    """Return why the bootstrap server of an instance that needs one does not answer; empty if it does."""
    kv = instance.kv_transfer
    if kv.protocol != agent_pb2.KV_PROTOCOL_MOONCAKE or kv.role == agent_pb2.KV_ROLE_CONSUMER:
        return ""
    try:
        with open_directly(f"{kv.bootstrap_url}/query", TIMEOUT_S):
            return ""
    except OSError as error:
        return str(error) or type(error).__name__


class _Side(NamedTuple):
    """What decides with which instances one can transfer KV."""

    sends: bool
    receives: bool
    kind: str  # InstanceInfo.kv_kind
    identity: EngineIdentity

    @classmethod
    def of(cls, instance: agent_pb2.Instance) -> _Side:
        """Return the side of an instance."""
        info, role = instance_and_load_messages.instance_info(instance), instance.kv_transfer.role
        sends, receives = role != agent_pb2.KV_ROLE_CONSUMER, role != agent_pb2.KV_ROLE_PRODUCER
        return cls(sends, receives, info.kv_kind, info.known_identity)

    def passes_to(self, other: _Side) -> bool:
        """Return whether an instance with this side can send KV to one with the `other`."""
        return (
            self.sends
            and other.receives
            and self.kind == other.kind != ""
            and compatible(self.identity, other.identity, Use.KV)
        )


def answers(pool: Sequence[agent_pb2.Instance], access: EngineAccess) -> Iterator[Finding]:
    """Yield whether greedy answers from transferred KV equal those of an engine that computes the prompt itself. `pool`: the
    instances of one model that can answer. Each one that can send KV is compared with the next one that can receive it."""
    pairs = list(pairs_of(pool))
    for source, target in pairs[:MAX_PAIRS]:
        yield _compared(source, target, access)
    if len(pairs) > MAX_PAIRS:
        found = f"answers of {MAX_PAIRS} of {len(pairs)} pairs were compared"
        yield Finding(Finding.OK, f"model {pool[0].model} KV transfer", found)


def pairs_of(pool: Sequence[agent_pb2.Instance]) -> Iterator[tuple[agent_pb2.Instance, agent_pb2.Instance]]:
    """Yield each instance that can send KV, with the next one in the order of `pool` that can receive it and does not refuse
    it."""
    refused = refused_senders(map(instance_and_load_messages.instance_info, pool))
    able = [(instance, _Side.of(instance)) for instance in pool if instance.kv_transfer.protocol]
    for number, (source, gives) in enumerate(able):
        for target, takes in itertools.chain(able[number + 1 :], able[:number]):
            if gives.passes_to(takes) and source.instance_id not in refused.get(target.instance_id, ()):
                yield source, target
                break


def _compared(source: agent_pb2.Instance, target: agent_pb2.Instance, access: EngineAccess) -> Finding:
    name = f"{source.instance_id} -> {target.instance_id} KV"
    found = ""
    for _ in range(PROMPTS):
        prompt = " ".join(str(random.randrange(10_000)) for _ in range(WORDS))
        try:
            # The salt keeps the prompt out of the cache that the second request finds.
            alone = Answer.of(
                complete(target, _question(prompt) | {"cache_salt": secrets.token_hex(8)}, access, ANSWER_S)[0]
            )
            moved = Answer.of(_offloaded(source, target, prompt, access))
        except (OSError, HTTPException, LookupError, TypeError, ValueError) as error:
            return Finding(
                Finding.WARN,
                name,
                f"answers could not be compared: {_reason(error)}",
                "see the logs of the two engines",
            )
        if moved.cached_tokens == 0:
            found = "the receiver computed a prompt itself whose KV was sent to it"
            return Finding(Finding.WARN, name, found, "see the receiver's log")
        if not (found := difference(alone, moved)):
            if moved.cached_tokens is None:
                found = "answers are equal, but the receiver does not report whether it used the KV"
                return Finding(Finding.WARN, name, found, "start it with --enable-prompt-tokens-details")
            return Finding(Finding.OK, name, "an answer from transferred KV is the one without")
    return Finding(
        Finding.FAIL,
        name,
        f"answers from transferred KV differ from those without: {found}",
        "use no policy that transfers KV until it is clear why; compare the two engines' versions and flags",
    )


def _question(prompt: str) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0, "logprobs": 5, "ignore_eos": True}


def _offloaded(
    source: agent_pb2.Instance, target: agent_pb2.Instance, prompt: str, access: EngineAccess
) -> dict[str, Any]:
    """Return the answer of `target` from KV that `source` computes, asked as gateways ask."""
    question = _question(prompt)
    prefill = question | {"max_tokens": 1, "logprobs": None}
    if source.kv_transfer.protocol != agent_pb2.KV_PROTOCOL_MOONCAKE:
        prefilled = complete(source, prefill | {"kv_transfer_params": nixl_send()}, access, ANSWER_S)[0]
        params = dict(prefilled["kv_transfer_params"])
        # With it vLLM reports the sender's cached tokens in place of the receiver's.
        params.pop("remote_prefill_cached_tokens", None)
        return complete(target, question | {"kv_transfer_params": params}, access, ANSWER_S)[0]
    bootstrap, transfer_id = source.kv_transfer.bootstrap_url, secrets.token_hex(16)
    rank = source.data_parallel_rank if source.HasField("data_parallel_rank") else 0
    with open_directly(f"{bootstrap}/query", TIMEOUT_S) as answer:
        engine_id = json.load(answer)[str(rank)]["engine_id"]
    prefill["kv_transfer_params"] = mooncake_send(transfer_id)
    question["kv_transfer_params"] = mooncake_fetch(transfer_id, engine_id, bootstrap)
    if not (source.kv_transfer.layerwise and target.kv_transfer.layerwise):
        complete(source, prefill, access, ANSWER_S)
        return complete(target, question, access, ANSWER_S)[0]
    with ThreadPoolExecutor(1) as receiver:
        answered = receiver.submit(complete, target, question, access, ANSWER_S)
        complete(source, prefill, access, ANSWER_S)
        return answered.result()[0]


@dataclass(frozen=True)
class Answer:
    """A greedy answer. `top`: for each token the log probabilities of the best ones, empty if the engine does not report them."""

    text: str
    tokens: Sequence[str]
    top: Sequence[Mapping[str, float]]
    cached_tokens: int | None

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> Answer:
        """Read vLLM's answer to a completion request."""
        choice = answer["choices"][0]
        logprobs = choice.get("logprobs") or {}
        details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
        return cls(
            choice["text"],
            logprobs.get("tokens") or (),
            logprobs.get("top_logprobs") or (),
            details.get("cached_tokens"),
        )


def difference(alone: Answer, moved: Answer) -> str:
    """Return how `moved`, a greedy answer from transferred KV, differs from `alone`, one without; empty if both have the same
    tokens with about the same log probabilities, or part at a tie. Without log probabilities the texts are compared."""
    for number, (own, other) in enumerate(zip(alone.tokens, moved.tokens, strict=False)):
        best, seen = dict(alone.top[number]), dict(moved.top[number])
        for token in (own, other):
            if token in best and token in seen and abs(best[token] - seen[token]) >= SHIFT:
                return (
                    f"token {number + 1}: log probability of {token!r} {seen[token]:.2f} instead of {best[token]:.2f}"
                )
        if own != other:
            gap = best[own] - best[other] if other in best else None
            if gap is not None and gap <= TIE:
                return ""
            by = "not among the best five" if gap is None else f"less probable by {gap:.2f} nats"
            return f"token {number + 1} is {other!r} instead of {own!r}, {by}"
    return "" if alone.text == moved.text else f"{moved.text[:40]!r} instead of {alone.text[:40]!r}"


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        with error:
            return f"an engine answered {error.code}: {error.read(200).decode(errors='replace')}"
    return str(error)

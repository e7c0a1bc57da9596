"""`pointsman doctor`: checks of a fleet, with advice on what to change."""

from __future__ import annotations

import ssl
import time
import urllib.error
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pointsman.agent.v1 import agent_pb2
from pointsman.router.v1 import fleet_pb2
from pointsman_cli.all_routers import instances_of
from pointsman_cli.doctor_findings import (
    ASKED_AT_ONCE,
    TIMEOUT_S,
    EngineAccess,
    Finding,
    UnreadableAnswer,
    clock,
    complete,
    json_object,
    reason_of_request,
)
from pointsman_cli.doctor_gateways import known_gateways, named_gateway
from pointsman_cli.doctor_kv import answers, transfers
from pointsman_cli.doctor_redis import RedisUrls, redis_findings
from pointsman_cli.instance_commands import answering_of, engine_count, order_words, orders_of, state_words, suspension
from pointsman_cli.router_call import ask, dial, sentence
from pointsman_common.core.block_keys import KEY_TOKENS
from pointsman_common.core.vllm_versions import standing
from pointsman_common.io.direct_http import open_directly

# Base URL of the agent of `pointsman up`.
AGENT = "http://127.0.0.1:9101"
# Age of an instance's last report above which it is a finding, s.
STALE_REPORT_S = 5.0
# Maximum number of instances that one finding names.
SHOWN = 5
# Maximum number of engines without an instance that are named.
MAX_ABSENT = 20
# Age of a cordon above which it is a finding, s.
LONG_CORDONED_S = 86_400.0
# States in which an instance can get requests.
PLACEABLE = (fleet_pb2.INSTANCE_STATE_SYNCING, fleet_pb2.INSTANCE_STATE_READY, fleet_pb2.INSTANCE_STATE_LOST)
# States that an operator's order has made.
ORDERED = (fleet_pb2.INSTANCE_STATE_CORDONED, fleet_pb2.INSTANCE_STATE_DRAINING)
# How an engine is started with KV events.
KV_EVENTS_FLAGS = (
    "--kv-events-config "
    '\'{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5657"}\''
)
# Causes (Life.out_cause) for which the router refuses requests if all instances are out.
ANSWERS_NOTHING = ("silence", "unreached")


def examine(
    router: str,
    gateway: str = "",
    redis: RedisUrls | None = None,
    agents: Sequence[str] = (),
    access: EngineAccess | None = None,
) -> list[Finding]:
    """Return all findings about the fleet of a router ("HOST:PORT") and a gateway (base URL; empty: those that the router knows),
    and about the engines of `agents` (base URLs). Sends each engine a request for one token, and pairs that can transfer KV short
    prompts."""
    findings: list[Finding] = []
    replicas: fleet_pb2.ListReplicasResponse | None = None
    try:
        replicas = ask(router, lambda fleet: fleet.ListReplicas, fleet_pb2.ListReplicasRequest(), TIMEOUT_S)
        findings += _router(router, replicas, access or EngineAccess())
    except grpc.RpcError as error:
        findings.append(unanswered(router, error))
    for agent in agents:
        findings += _agent(agent)
    findings += named_gateway(gateway) if gateway else known_gateways(router, replicas)
    if redis is not None:
        findings += redis_findings(redis)
    return findings


def _router(router: str, replicas: fleet_pb2.ListReplicasResponse, access: EngineAccess) -> Iterator[Finding]:
    """Yield findings about a router, the other routers, and the instances."""
    try:
        fleet, silent = instances_of(router)
        with dial(router) as channel:
            health = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service="pointsman.router.v1.PlacementService"), timeout=TIMEOUT_S
            )
    except grpc.RpcError as error:
        yield unanswered(router, error)
        return
    if health.status == health_pb2.HealthCheckResponse.SERVING:
        yield Finding(Finding.OK, "router", f"{fleet.router_id} places with {fleet.policy.name}")
    else:
        yield Finding(Finding.WARN, "router", f"{fleet.router_id} is starting", "wait for its agents, then check again")
    yield from redundancy(replicas)
    yield from refused_policies(replicas)
    for problem in silent:
        yield Finding(Finding.WARN, "routers", problem, "run `pointsman doctor` on a node of a gateway")
    yield from absences(fleet)
    # Without any instance the finding is that there are agents, and why they report none.
    if fleet.instances or not fleet.absent_engines:
        yield from _fleet(list(fleet.instances), access)
    yield from _orders(router)


def absences(fleet: fleet_pb2.ListInstancesResponse) -> Iterator[Finding]:
    """Yield the engines that agents are set to follow and that have no instance."""
    if not fleet.absent_engines:
        return
    yield Finding(Finding.FAIL, "engines", f"{engine_count(fleet)} have instances", "see below")
    for engine in fleet.absent_engines[:MAX_ABSENT]:
        advice = f"start it, or take it out of the engines of the agent on {engine.node}"
        yield Finding(Finding.FAIL, engine.url, f"no instance: {engine.problem}", advice)
    if (others := len(fleet.absent_engines) - MAX_ABSENT) > 0:
        yield Finding(Finding.FAIL, "engines", f"{others} others have no instance", "pointsman instances names them")


def unanswered(router: str, error: grpc.RpcError) -> Finding:
    """Return the finding that a router refused a call or does not answer."""
    found, advice = f"{router} {sentence(error)}", "see its log"
    if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        advice = "start it; if it runs elsewhere: --router HOST:PORT"
    elif error.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        advice = "give its token: POINTSMAN_OPERATOR_TOKEN, POINTSMAN_OBSERVER_TOKEN or POINTSMAN_TOKEN_DIR"
    return Finding(Finding.FAIL, "router", found, advice)


def redundancy(replicas: fleet_pb2.ListReplicasResponse) -> Iterator[Finding]:
    """Yield whether all routers that share a store are alive; nothing if the router has no shared store."""
    asked = replicas.this_replica
    if asked.store != "redis":
        return
    if asked.degraded:
        # What it knows of other routers is as old as Redis' last answer.
        answered = (
            f", which answered {asked.store_answer_age.seconds} s ago" if asked.HasField("store_answer_age") else ""
        )
        yield Finding(
            Finding.FAIL,
            "routers",
            f"{asked.router_id} places without Redis{answered}",
            "find the reason in its log: Redis is away, or takes no writes",
        )
        return
    found = f"{len(replicas.replicas)} alive: {', '.join(replica.router_id for replica in replicas.replicas)}"
    if not replicas.lost_replicas:
        yield Finding(Finding.OK, "routers", found)
        return
    lost = ", ".join(
        f"{replica.router_id} ended without notice {replica.heartbeat_age.ToMilliseconds() / 1e3:.0f} s ago"
        for replica in replicas.lost_replicas
    )
    yield Finding(
        Finding.WARN,
        "routers",
        f"{found}; {lost}, and none has taken its place",
        "start it again, or another one; a router that stays away is no longer reported after a day",
    )


def refused_policies(replicas: fleet_pb2.ListReplicasResponse) -> Iterator[Finding]:
    """Yield the routers that do not place by the fleet's policy, with the reason of each."""
    for replica in replicas.replicas:
        if replica.policy_problem:
            yield Finding(
                Finding.FAIL,
                f"router {replica.router_id}",
                f"places with {replica.policy.name}, not with the fleet's policy: {replica.policy_problem}",
                "install there what the policy needs, or choose another one: pointsman set-policy NAME",
            )


def _fleet(instances: list[fleet_pb2.InstanceStatus], access: EngineAccess) -> Iterator[Finding]:
    if not instances:
        yield Finding(
            Finding.FAIL,
            "instances",
            "none",
            "start `pointsman agent --engines URL --routers HOST:PORT`; if it runs, check it: --agent http://HOST:9101",
        )
        # The agent of a local `pointsman up` may report why.
        yield from (finding for finding in _agent(AGENT) if finding.check != f"agent {AGENT}")
        return
    for model in sorted({status.instance.model for status in instances}):
        statuses = [status for status in instances if status.instance.model == model]
        pool = [status.instance for status in statuses]
        sizes = sorted({instance.block_size for instance in pool})
        yield from placeability(model, statuses)
        yield (
            Finding(Finding.OK, f"model {model}", f"block size {sizes[0]}")
            if len(sizes) == 1
            else Finding(
                Finding.WARN,
                f"model {model}",
                f"block sizes {sizes} differ",
                "give all its engines the same --block-size",
            )
        )
        yield from uniformity(model, statuses)
        yield from versions(model, pool)
        yield from transfers(pool)
        yield from answers(
            [status.instance for status in statuses if status.state == fleet_pb2.INSTANCE_STATE_READY], access
        )
    with ThreadPoolExecutor(ASKED_AT_ONCE) as threads:
        for findings in threads.map(lambda status: list(_instance(status, access)), instances):
            yield from findings


def placeability(model: str, pool: Sequence[fleet_pb2.InstanceStatus]) -> Iterator[Finding]:
    """Yield how many instances of a model can get requests to answer."""
    answering = answering_of(pool)
    beside = f", beside {others} that only produce KV" if (others := len(pool) - len(answering)) else ""
    placeable = sum(status.state in PLACEABLE and not status.circuit_open for status in answering)
    if placeable:
        found = f"{placeable} of {len(answering)} instances placeable{beside}"
        yield Finding(Finding.OK, f"model {model}", found)
        return
    counts = Counter(state_words(status) + ", out" * status.circuit_open for status in answering)
    states = ", ".join(f"{count} {words}" for words, count in sorted(counts.items())) + beside
    # What an operator has not ruled out, and is not asleep, gets requests if there is nothing better.
    asked = [status for status in answering if status.state in (*PLACEABLE, fleet_pb2.INSTANCE_STATE_UNHEALTHY)]
    if asked:
        mute = all(status.life.out_cause in ANSWERS_NOTHING for status in asked)
        what = "each is tried by one request at a time, the others get 503"
        found = f"none healthy: {states}; {what if mute else 'requests are placed on them all the same'}"
        yield Finding(Finding.FAIL, f"model {model}", found, "see the findings of each instance below")
        return
    advice = (
        "place on one again: pointsman uncordon INSTANCE, pointsman drain INSTANCE --resume"
        if any(status.state in ORDERED for status in answering)
        else "see the findings of each instance below"
    )
    yield Finding(Finding.FAIL, f"model {model}", f"none placeable: {states}", advice)


def uniformity(model: str, pool: Sequence[fleet_pb2.InstanceStatus]) -> Iterator[Finding]:
    """Yield what instances of a model differ in from the most of them, and those that a second agent announces."""
    # Different revisions may have the same tokenizer. Gateways compare them.
    if len({status.instance.model_root.partition("@")[0] for status in pool}) > 1:
        yield Finding(
            Finding.WARN,
            f"model {model}",
            "instances loaded it from different sources",
            "serve different models under different names",
        )
    differing: dict[str, list[str]] = {}
    for status in pool:
        for difference in status.differences:
            differing.setdefault(difference, []).append(status.instance.instance_id)
        if status.rival:
            yield Finding(
                Finding.FAIL,
                status.instance.instance_id,
                f"announced by a second agent, which is refused: {status.rival}",
                "give each engine its own address (advertise=), and only one agent",
            )
    for difference, names in sorted(differing.items()):
        others = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        yield Finding(
            Finding.WARN,
            f"model {model}",
            f"{', '.join(names[:SHOWN])}{others}: {difference} (of the others)",
            "no answer, session or KV passes between engines of different weights or types, and long prompts go to the larger "
            "context only: a rolling change; else serve them under different names",
        )


def versions(model: str, pool: Sequence[agent_pb2.Instance]) -> Iterator[Finding]:
    """Yield each version of vLLM in a pool that is not the tested one, with what is off with it."""
    counts = Counter(instance.engine_version for instance in pool)
    for version, count in sorted(counts.items()):
        if off := standing(version):
            yield Finding(
                Finding.WARN,
                f"model {model}",
                f"{count} of {len(pool)} run vLLM {version}, {off}",
                "see docs/vllm_versions.md",
            )


def _orders(router: str) -> Iterator[Finding]:
    try:
        orders = orders_of(router)
    except grpc.RpcError as error:
        yield Finding(Finding.WARN, "orders", f"{router} {sentence(error)}")
    else:
        yield from forgotten_orders(orders, time.time())


def forgotten_orders(orders: Sequence[fleet_pb2.InstanceOrder], now: float) -> Iterator[Finding]:
    """Yield the orders that may have been forgotten at `now` (unix s): old cordons, and orders for unknown instances."""
    for order in orders:
        words = order_words(order)
        undo = "; ".join(
            [f"pointsman uncordon {order.instance_id}"] * order.cordoned
            + [f"pointsman weight {order.instance_id} 1"] * (order.weight < 1)
        )
        if not order.instance_known:
            found = f"{words}; no agent reports an instance of this id"
            yield Finding(Finding.WARN, order.instance_id, found, f"if it went for good: {undo}")
        elif order.cordoned and now - order.cordon_time.ToNanoseconds() / 1e9 > LONG_CORDONED_S:
            yield Finding(
                Finding.WARN,
                order.instance_id,
                f"{words}; for more than a day",
                f"pointsman uncordon {order.instance_id}",
            )


def instance_finding(status: fleet_pb2.InstanceStatus) -> Finding:
    """Return whether an instance can get requests, with the operators' orders for it."""
    name, ordered, age = status.instance.instance_id, order_words(status), status.report_age.ToMilliseconds() / 1e3
    remarks = ", ".join(filter(None, (suspension(status), ordered)))
    state = state_words(status) + (f" ({remarks})" if remarks else "")
    if status.state in ORDERED:
        undo = ""
        if status.state == fleet_pb2.INSTANCE_STATE_DRAINING:
            undo = f"the drain ends with its engine's restart, or: pointsman drain {name} --resume"
        if status.underlying_state in (*PLACEABLE, fleet_pb2.INSTANCE_STATE_UNSPECIFIED):
            return Finding(Finding.OK, name, state, undo)
        logs = "see the agent's and the engine's logs before you place on it again"
        return Finding(Finding.WARN, name, state, "; ".join(filter(None, (logs, undo))))
    if status.state == fleet_pb2.INSTANCE_STATE_SUSPENDED:
        advice = "no requests are placed on it until its engine is woken up (POST /wake_up) or resumed (POST /resume)"
        return Finding(Finding.WARN, name, state, advice)
    if status.circuit_open:
        found = f"out: {status.life.reason or 'it failed several requests in a row'}"
        return Finding(Finding.FAIL, name, f"{state}, {found}", "see the engine's log")
    if status.state != fleet_pb2.INSTANCE_STATE_READY:
        # What the agent saw, and what the router makes of it.
        why = "; ".join(filter(None, (status.load.problem, status.life.reason)))
        return Finding(Finding.FAIL, name, f"{state}: {why}" if why else state, "see the agent's and the engine's logs")
    if age > STALE_REPORT_S:
        advice = "check whether its agent is overloaded, and the network between agent and router"
        return Finding(Finding.WARN, name, f"last report {age:.0f} s ago", advice)
    return Finding(Finding.OK, name, f"{state}, vLLM {status.instance.engine_version}, report {age:.1f} s old")


def load_findings(status: fleet_pb2.InstanceStatus) -> Iterator[Finding]:
    """Yield what is not known of the load of an instance whose engine answers."""
    name, load = status.instance.instance_id, status.load
    if load.healthy and load.problem:
        advice = "requests are placed on it all the same; see the agent's and the engine's logs"
        yield Finding(Finding.WARN, name, load.problem, advice)
    # Engines without a KV connector need not have the others.
    unknown = [figure for figure in load.unknown if not figure.startswith("external_")]
    if not unknown:
        return
    found = f"its /metrics has no number for: {', '.join(unknown)}"
    advice = "compare its version with docs/existing_vllm.md"
    if {"kv_usage", "waiting"}.intersection(unknown):
        advice += "; the limit --max-kv-usage does not act on this instance"
    yield Finding(Finding.WARN, name, found, advice)


def _instance(status: fleet_pb2.InstanceStatus, access: EngineAccess) -> Iterator[Finding]:
    name = status.instance.instance_id
    yield instance_finding(status)
    yield from load_findings(status)
    if status.instance.prefix_mode != agent_pb2.PREFIX_MODE_EXACT:
        yield inexact_finding(status.instance)
    elif status.events_contradicted:
        yield contradicted_finding(status)
    elif status.keys == 0 and status.load.prefix_cache_queries > status.instance.block_size:
        yield Finding(
            Finding.WARN,
            name,
            "requests ran, but no cached block is known",
            "check that the agent can reach the engine's KV-event address",
        )
    if status.instance.block_size % KEY_TOKENS:
        yield Finding(Finding.FAIL, name, f"block size {status.instance.block_size}", f"use a multiple of {KEY_TOKENS}")
    if not suspension(status):
        # A suspended engine would keep the request until it is resumed.
        yield from _engine(status.instance, access)


def contradicted_finding(status: fleet_pb2.InstanceStatus) -> Finding:
    """Return why the KV events of an instance are not used as exact."""
    return Finding(
        Finding.WARN,
        status.instance.instance_id,
        f"prefixes are approximate: {status.prefix_reason}",
        "check that the agent reaches the engine's KV-event addresses, and its log for events that it cannot read",
    )


def inexact_finding(instance: agent_pb2.Instance) -> Finding:
    """Return why the cached prefixes of an instance without PREFIX_MODE_EXACT are not known, with the flags that change this, if
    any do."""
    if instance.events_unusable:
        return Finding(
            Finding.WARN,
            instance.instance_id,
            f"prefixes are approximate: {instance.prefix_reason}",
            "no flag for KV events changes this; the router learns prefixes from its own placements",
        )
    return Finding(
        Finding.FAIL,
        instance.instance_id,
        f"no KV events: {instance.prefix_reason}",
        f"start the engine with --enable-prefix-caching and {KV_EVENTS_FLAGS}",
    )


def _engine(instance: agent_pb2.Instance, access: EngineAccess) -> Iterator[Finding]:
    name = f"{instance.instance_id} engine"
    try:
        answer, ahead_s = complete(instance, {"prompt": "ok", "max_tokens": 1}, access)
    except urllib.error.HTTPError as error:
        error.close()
        advice = "give its API key: --engine-api-key" if error.code in (401, 403) else "see the engine's log"
        yield Finding(Finding.WARN, name, f"answers {error.code}", advice)
        return
    except UnreadableAnswer as error:
        yield Finding(Finding.WARN, name, str(error), "check its address: is it an engine that answers there?")
        return
    except OSError as error:
        if isinstance(getattr(error, "reason", None), ssl.SSLCertVerificationError):
            advice = "name the authority that signed it: --engine-ca here, engine_ca for agents and gateways"
            yield Finding(Finding.WARN, name, f"its certificate is not trusted: {error}", advice)
            return
        yield Finding(
            Finding.WARN,
            name,
            f"not reachable from here: {reason_of_request(error)}",
            "run `pointsman doctor` on a node of a gateway",
        )
        return
    usage = answer.get("usage")
    if not isinstance(usage, dict) or usage.get("prompt_tokens_details") is None:
        yield Finding(
            Finding.WARN,
            name,
            "does not report cached tokens",
            "start it with --enable-prompt-tokens-details, so that predictions can be checked",
        )
    else:
        yield Finding(Finding.OK, name, "answers, and reports its cached tokens")
    yield from clock(name, ahead_s)


def _agent(agent: str) -> Iterator[Finding]:
    name = f"agent {agent}"
    try:
        with open_directly(f"{agent}/health", TIMEOUT_S) as answer:
            findings = list(_engines_of(name, json_object(answer)["engines"]))
    except OSError as error:
        yield Finding(Finding.FAIL, name, reason_of_request(error), "check that it runs, with metrics_listen")
    except (LookupError, TypeError, AttributeError):
        # A gateway or a router, for example, whose /health is JSON, too.
        found, advice = "what answers there is no agent", "give the address of the agent's metrics_listen"
        yield Finding(Finding.FAIL, name, found, advice)
    else:
        yield from findings


def _engines_of(name: str, engines: list[dict[str, Any]]) -> Iterator[Finding]:
    """Yield what the agent `name` says of its engines in its /health. Raises LookupError, TypeError or AttributeError if that is
    not an agent's."""
    for engine in engines:
        what = f"{name}: {engine['engine']}"
        for instance in engine.get("instances", ()):
            for router, said in instance["routers"].items():
                if said not in ("connected", "connecting"):
                    found = f"{router} refuses {instance['instance_id']}: {said}"
                    yield Finding(Finding.FAIL, what, found, "see the agent's log")
        if engine["healthy"] and engine["problem"]:
            yield Finding(Finding.WARN, what, engine["problem"], "see the engine's log")
        elif engine["healthy"]:
            yield Finding(Finding.OK, what, "is monitored")
        else:
            yield Finding(Finding.FAIL, what, engine["problem"], "see the engine's log, and the agent's settings")

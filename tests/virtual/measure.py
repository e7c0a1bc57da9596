"""Measures the coefficients of tests/support/virtual/costs.py on this machine, in about a minute."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import redis

from pointsman.agent.v1 import agent_pb2
from pointsman_common.core import key_report_wire
from pointsman_common.core.key_report_types import SnapshotBegin
from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.analysis.policy_comparison import PolicyComparison
from pointsman_router.core.load.affinity import Affinity
from pointsman_router.core.load.reservations import Reservation
from pointsman_router.core.placement_types import Decision, Load
from pointsman_router.core.policy.registry import make_policy
from pointsman_router.core.prefix.exact_index import PrefixIndex
from pointsman_router.core.router_state import RouterState
from pointsman_router.io.convert import instance_and_load_messages
from pointsman_router.io.convert.sent_fleet import SentFleet
from pointsman_router.io.store import redis_scripts
from pointsman_router.io.store.redis_store import BATCH, _change, _read
from tests.support.processes.redis import redis_server
from tests.support.router_values import join, place, request, state
from tests.support.virtual import costs

INSTANCES, KEYS, SESSIONS = 1_000, 1_000_000, 200_000
# Number of measurements of each coefficient; the fastest counts.
TIMES = 5
# Time of the measurements, s. It is after all instances have joined, so the routers' candidate snapshots stay valid.
NOW = 1.0


def main() -> int:
    """Print each coefficient, its measured value, and the ratio of the two."""
    print(f"{'coefficient':24}{'set, us':>10}{'here, us':>10}{'ratio':>8}")
    for measure in (_placements, _reports, _index, _sessions, _reservations, _fleet, _redis):
        for name, seconds in measure():
            known = getattr(costs, name)
            print(f"{name:24}{known * 1e6:10.2f}{seconds * 1e6:10.2f}{seconds / known:8.2f}", flush=True)
    return 0


def _each(work: Callable[[], object], count: int, before: Callable[[], object] = object) -> float:
    """Return the CPU seconds of one of the `count` operations of `work`. `before` prepares each measurement."""
    fastest = float("inf")
    for _ in range(TIMES):
        before()
        began = time.process_time()
        work()
        fastest = min(fastest, time.process_time() - began)
    return fastest / count


def _fleet_of(count: int, policy: str = "lmetric") -> RouterState:
    fleet = state(policy)
    for number in range(count):
        join(fleet, f"i{number:04}", number + 1, list(range(number * 8, number * 8 + 8)))
    return fleet


def _placements() -> Iterator[tuple[str, float]]:
    costs_of: dict[tuple[int, int], float] = {}
    for instances, keys in ((1, 0), (INSTANCES, 0), (1, 5_000)):
        fleet, rounds = _fleet_of(instances), 100
        names = iter(range(1_000_000))

        def play(fleet: RouterState = fleet, keys: int = keys, names: Iterator[int] = names) -> None:
            for _ in range(100):
                name = f"r{next(names)}"
                asked = request(name, keys * 16, session_id=name)
                asked = msgspec.structs.replace(asked, keys=tuple(range(10**9, 10**9 + keys)))
                place(fleet, asked, NOW)
                fleet.handle(ev.Finished(name, "OK"), NOW)

        costs_of[instances, keys] = _each(play, rounds)
        if instances == INSTANCES:

            def look(fleet: RouterState = fleet) -> None:
                for _ in range(50):
                    fleet.views.has_room("m", "m", NOW)

            yield "ROOM_S", _each(look, 50 * INSTANCES)
    base = costs_of[1, 0]
    yield "PLACEMENT_S", base
    yield "CANDIDATE_S", (costs_of[INSTANCES, 0] - base) / (INSTANCES - 1)
    yield "PROMPT_KEY_S", (costs_of[1, 5_000] - base) / 5_000
    fleet = _fleet_of(INSTANCES)
    decisions = []
    for number in range(50):
        answer = place(fleet, request(f"w{number}", 1_000), NOW)
        assert isinstance(answer, ev.Placed)
        decisions.append(answer.decision)
    policy = make_policy("foresight", {})

    def compared(fleet: RouterState, decisions: Sequence[Decision]) -> None:
        comparison = PolicyComparison()
        for decision in decisions:
            comparison.add(decision, fleet.what_if(decision, policy))

    whole = _each(lambda: compared(fleet, decisions), 50)
    small = _fleet_of(1)
    recorded = []
    for number in range(200):
        answer = place(small, request(f"w{number}", 1_000), NOW)
        assert isinstance(answer, ev.Placed)
        recorded.append(answer.decision)
    alone = _each(lambda: compared(small, recorded), 200)
    yield "WHAT_IF_S", alone
    yield "WHAT_IF_CANDIDATE_S", (whole - alone) / (INSTANCES - 1)


def _reports() -> Iterator[tuple[str, float]]:
    fleet = _fleet_of(64)
    raw = agent_pb2.ReportRequest(load=agent_pb2.Load(running=3, healthy=True, kv_usage=0.5)).SerializeToString()

    def report() -> None:
        for number in range(2_000):
            message = agent_pb2.ReportRequest.FromString(raw)
            sample: Load = instance_and_load_messages.load(message.load, 0.0)
            fleet.handle(ev.LoadReported(number % 64 + 1, f"i{number % 64:04}", sample), 0.0)

    yield "EVENT_S", _each(report, 2_000)
    rng = random.Random(1)
    keys = [rng.getrandbits(64) for _ in range(100_000)]

    def send() -> list[bytes]:
        copy = list(dict.fromkeys(keys).keys())
        return [
            agent_pb2.ReportRequest(
                snapshot_chunk=agent_pb2.SnapshotChunk(tier=agent_pb2.TIER_DEVICE, keys=copy[at : at + 2_048])
            ).SerializeToString()
            for at in range(0, len(copy), 2_048)
        ]

    yield "SENT_KEY_S", _each(send, len(keys))
    reports = send()
    receiver = state()
    incarnations = iter(range(100))

    def receive() -> None:
        receiver.handle(ev.KeysReported(1, "a", SnapshotBegin(0)), 0.0)
        for report in reports:
            wire = agent_pb2.ReportRequest.FromString(report)
            for piece in range(key_report_wire.pieces(wire)):
                message = key_report_wire.key_message(wire, piece)
                assert message is not None
                receiver.handle(ev.KeysReported(1, "a", message), 0.0)

    yield (
        "REPORTED_KEY_S",
        _each(receive, len(keys), lambda: join(receiver, "a", 1, incarnation=str(next(incarnations)))),
    )


def _index() -> Iterator[tuple[str, float]]:
    index = PrefixIndex()
    rng = random.Random(1)
    keys = [rng.getrandbits(64) for _ in range(KEYS)]

    def retire() -> None:
        for number in range(8):
            index.add(f"o{number}", keys[number * KEYS // 8 : (number + 1) * KEYS // 8])
            index.add("kept", keys[number * KEYS // 8 : (number + 1) * KEYS // 8])
            index.drop(f"o{number}")

    def sweep() -> None:
        index.sweep()
        while index.sweeping:
            index.sweep()

    yield "SWEPT_KEY_S", _each(sweep, KEYS, retire)


def _sessions() -> Iterator[tuple[str, float]]:
    affinity = Affinity(3_600.0)
    names = {f"session-{number:010}": f"i{number % 1_000:04}" for number in range(SESSIONS)}

    def recall() -> None:
        for session, owner in names.items():
            affinity.recall("m", session, owner, 0.0)

    def free() -> None:
        while affinity._given_up:
            affinity.expire(0.0)

    def forget() -> None:
        affinity.forget_pool("m")
        free()

    yield "SESSION_RECALLED_S", _each(recall, SESSIONS, forget)
    recall()

    def give_up() -> None:
        recall()
        affinity.forget_pool("m")

    yield "SESSION_FREED_S", _each(free, SESSIONS, give_up)
    recall()

    def write() -> None:
        changes = [_change(ev.SessionOwnerSet(*known, "m")) for known in affinity.returning("m") if known is not None]
        for at in range(0, len(changes), BATCH):
            msgspec.json.encode(changes[at : at + BATCH])

    yield "CHANGE_WRITTEN_S", _each(write, SESSIONS)


def _reservations() -> Iterator[tuple[str, float]]:
    count = 5_000
    kept = [
        msgspec.json.encode(Reservation(f"r{number}", "g", f"i{number % 64:04}", "d", 1_000, 500, pool="m"))
        for number in range(count)
    ]
    fleet = _fleet_of(64)

    def take() -> None:
        opened = [reservation for raw in kept if (reservation := _read(raw, Reservation)) is not None]
        fleet.handle(ev.PoolTaken("m", tuple(opened), None), 0.0)

    yield "RESERVATION_TAKEN_S", _each(take, count, lambda: fleet.handle(ev.PoolLost("m"), 0.0))


def _fleet() -> Iterator[tuple[str, float]]:
    fleet = _fleet_of(INSTANCES)
    sent = SentFleet(1.0)
    sent.update(fleet.instances.pools(), lambda pool: None, starting=False)
    yield "FLEET_INSTANCE_S", _each(lambda: sent.whole().SerializeToString(), INSTANCES)


def _redis() -> Iterator[tuple[str, float]]:
    with tempfile.TemporaryDirectory() as folder, redis_server(Path(folder)) as (url, _):
        client = redis.Redis.from_url(url, decode_responses=True)
        names = {f"session-{number:010}": f"i{number % 1_000:04}" for number in range(SESSIONS)}
        for at in range(0, SESSIONS, 1_000):
            client.hset("h", mapping=dict(list(names.items())[at : at + 1_000]))

        def redis_s() -> float:
            info = client.info("cpu")
            return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])

        def served(work: Callable[[], object], count: int) -> float:
            began = redis_s()
            work()
            return (redis_s() - began) / count

        def read() -> None:
            cursor = 0
            while True:
                cursor, _ = client.hscan("h", cursor, count=BATCH)
                if not cursor:
                    return

        yield "REDIS_FIELD_S", served(read, SESSIONS)
        yield "SESSION_PARSED_S", _each(read, SESSIONS)
        apply = client.register_script(redis_scripts.APPLY)
        client.set("epoch", 1)
        keys = ["epoch", "number", "open", "affinity", "expiry", "mean_work"]

        def write() -> None:
            changes = [_change(ev.SessionOwnerSet(*name, "m")) for name in names.items()]
            for at in range(0, 50_000, BATCH):
                apply(keys=keys, args=[1, 3_600_000, msgspec.json.encode(changes[at : at + BATCH]), at + 1, 10**6])

        yield "REDIS_CHANGE_S", served(write, 50_000)
        yield "REDIS_COMMAND_S", served(lambda: [client.get("epoch") for _ in range(5_000)], 5_000)

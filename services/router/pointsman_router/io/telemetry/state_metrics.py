"""Metrics that are read from the router's state when Prometheus scrapes /metrics. Between scrapes they cost nothing."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sized
from typing import cast

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from pointsman_common.core.key_report_types import Tier
from pointsman_router.core.analysis.pool_backlog import PoolBacklogs
from pointsman_router.core.instances.instance_registry import RIVAL_SHOWN_S, InstanceRecord, InstanceRegistry
from pointsman_router.core.instances.kv_refusals import refused_senders
from pointsman_router.core.placement_types import InstanceState
from pointsman_router.core.priority import Priority
from pointsman_router.core.router_state import RouterState

NAME = "pointsman_router_"


class StateCollector(Collector):
    """Metrics of one router's state. Each model has a series for every instance state: no ready instance is a 0, not a gap."""

    def __init__(
        self,
        state: RouterState,
        ready: Callable[[], bool],
        absent: Callable[[], Sized] = tuple,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` returns the time of the state's clock, s. `ready` returns whether the router places requests, `absent` the
        engines without an instance."""
        self._state = state
        self._ready = ready
        self._absent = absent
        self._clock = clock
        self._backlogs = PoolBacklogs(
            state.instances,
            state.reservations,
            state.prefill_observer,
            state.held_requests.queue,
            state.parked_requests.queue,
        )

    def describe(self) -> list[Metric]:
        """Return no metrics, so that registering does not call `collect`: the state may not be complete by then."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield all metric families."""
        yield GaugeMetricFamily(f"{NAME}ready", "1 when the router places requests", float(self._ready()))
        yield GaugeMetricFamily(
            f"{NAME}store_degraded", "1 while the shared store does not answer", float(self._state.degraded)
        )
        yield GaugeMetricFamily(
            f"{NAME}shared_names",
            "Model names that several pools share; requests for such a name go to the first pool",
            len(self._state.instances.shared_names),
        )
        yield GaugeMetricFamily(
            f"{NAME}sessions", "Sessions with an owner, of the pools that this replica owns", len(self._state.affinity)
        )
        yield GaugeMetricFamily(
            f"{NAME}reservations",
            "Open requests, each once, of the pools that this replica owns",
            len(self._state.reservations),
        )
        yield CounterMetricFamily(
            f"{NAME}sessions_ended",
            "Sessions with an owner that their clients have ended",
            self._state.affinity.ended_count,
        )
        yield GaugeMetricFamily(
            f"{NAME}absent_engines",
            "Engines that agents are set to follow and that have no instance",
            len(self._absent()),
        )
        yield self._orders()
        yield self._differing()
        yield from self._models()
        yield from self._instances()

    def _orders(self) -> Metric:
        orders = self._state.instances.orders.values()
        family = GaugeMetricFamily(
            f"{NAME}instance_orders",
            "Operators' orders in force, including those for unknown instances",
            labels=["kind"],
        )
        family.add_metric(["cordon"], sum(order.cordoned for order in orders))
        family.add_metric(["weight"], sum(order.weight < 1.0 for order in orders))
        return family

    def _differing(self) -> Metric:
        """Return how many instances differ from the most of their pool, by what they differ in."""
        instances = self._state.instances
        family = GaugeMetricFamily(
            f"{NAME}instances_differing",
            "Instances that differ from the most of their pool in weights, dtype, max_model_len, ...; rival: that a second agent "
            "announces",
            labels=["model", "what"],
        )
        now, counts = self._clock(), Counter[tuple[str, str]]()
        for record in instances.records():
            counts.update((record.info.model, what) for what in instances.differing(record))
            counts[record.info.model, "rival"] += now - record.rival[1] < RIVAL_SHOWN_S
        for (model, what), count in sorted(counts.items()):
            family.add_metric([model, what], count)
        return family

    def _models(self) -> Iterator[Metric]:
        state = self._state
        owned = GaugeMetricFamily(f"{NAME}pool_owned", "1 if this replica owns the model's pool", labels=["model"])
        held = GaugeMetricFamily(
            f"{NAME}held_requests",
            "Requests that wait for a placement, by priority class",
            labels=["model", "priority"],
        )
        instances = GaugeMetricFamily(f"{NAME}instances", "Instances by state", labels=["model", "state"])
        answering = GaugeMetricFamily(
            f"{NAME}answering_instances",
            "Ready instances that answer requests; those that only produce KV do so where the pool has no others",
            labels=["model"],
        )
        counts = Counter[tuple[str, InstanceState]]()
        # By model and whether they only produce KV: the pool's instances, and those of them that are ready.
        kinds, ready = set[tuple[str, bool]](), Counter[tuple[str, bool]]()
        for record in state.instances.unordered():
            health, kind = record.state, (record.info.model, record.info.produces_only)
            counts[record.info.model, health] += 1
            kinds.add(kind)
            ready[kind] += health is InstanceState.READY
        models, queue = {model for model, _ in kinds}, state.held_requests.queue
        for model in sorted(models):
            owned.add_metric([model], float(state.owned.owns(model)))
        # Requests also come, and wait, for a pool whose last instance has left. No router need own it.
        for model in sorted(models.union(state.gone_pools, queue.pools(), state.parked_requests.queue.pools())):
            for priority in Priority:
                held.add_metric([model, priority], queue.count(model, priority))
            for health in InstanceState:
                instances.add_metric([model, health], counts[model, health])
            answering.add_metric([model], ready[model, (model, False) not in kinds])
        yield from (owned, held, instances, answering)
        yield from self._admission()
        yield self._backlog()
        yield self._curve_samples()
        yield self._pool_policies()
        yield self._load_samples()

    def _admission(self) -> Iterator[Metric]:
        """Yield the session admission of the pools that this replica owns and whose sessions are admitted."""
        state, now = self._state, self._clock()
        models = [pool.model for pool in state.instances.pools()]
        models = [model for model in models if state.owned.owns(model) and state.admission.applies(model, now)]
        parked = GaugeMetricFamily(
            f"{NAME}parked_requests", "New sessions that are parked, by priority class", labels=["model", "priority"]
        )
        families = [
            GaugeMetricFamily(NAME + name, documentation, labels=["model"])
            for name, documentation in (
                ("admission_armed", "1 while new sessions are parked if they do not fit"),
                ("session_tokens", "KV of the sessions under way, each times its chance to be needed soon, in tokens"),
                ("session_capacity_tokens", "KV that the pool's caches are to hold, in tokens; 0 if unknown"),
                ("recomputed_share", "Share of the last minute's prefill that was computed before and evicted"),
            )
        ]
        for model in models:
            for priority in Priority:
                parked.add_metric([model, priority], state.parked_requests.queue.count(model, priority))
            status = state.admission.status(model, now)
            figures = (float(status.armed), status.weighted, status.capacity, status.recomputed_share)
            for family, figure in zip(families, figures, strict=True):
                family.add_metric([model], figure)
        yield from (parked, *families)

    def _backlog(self) -> Metric:
        """Return the backlog of the pools that this replica owns. An idle pool has 0, so that an autoscaler finds a value."""
        family = GaugeMetricFamily(
            f"{NAME}backlog_seconds",
            "Seconds of prefill that a new request of the route class waits for, per placeable instance",
            labels=["model", "route_class"],
        )
        for model, classes in sorted(self._backlogs.at(self._clock()).items()):
            if self._state.owned.owns(model):
                for name, seconds in classes.items():
                    family.add_metric([model, name], seconds)
        return family

    def _curve_samples(self) -> Metric:
        """Return the number of samples of each prefill curve; 0 for a curve without samples."""
        family = GaugeMetricFamily(
            f"{NAME}prefill_curve_samples",
            "Samples that the curve was learned from: prefills, or reports of steps; from 50 on, requests are refused that would "
            "miss their TTFT deadline",
            labels=["model", "hardware"],
        )
        kinds = {(record.info.model, record.info.hardware) for record in self._state.instances.records()}
        for model, hardware in sorted(kinds):
            if self._state.owned.owns(model):
                family.add_metric([model, hardware], self._state.prefill_observer.samples(model, hardware))
        return family

    def _pool_policies(self) -> Metric:
        """Return the policy that decides for each pool that this replica owns."""
        family = GaugeMetricFamily(
            f"{NAME}pool_policy",
            "1 for the policy that decides for the pool, with the reason for which policy auto takes it (empty: not auto)",
            labels=["model", "policy", "reason"],
        )
        now = self._clock()
        for model in sorted({record.info.model for record in self._state.instances.records()}):
            if self._state.owned.owns(model):
                taken = self._state.pool_policy(model, now).taken
                family.add_metric([model, taken.policy.name, taken.reason], 1.0)
        return family

    def _load_samples(self) -> Metric:
        """Return the number of samples of each price of loading KV; none for a tier without samples."""
        family = GaugeMetricFamily(
            f"{NAME}load_price_samples",
            "Samples that the price of loading KV was learned from, by tier: host, storage",
            labels=["model", "hardware", "tier"],
        )
        kinds = {(record.info.model, record.info.hardware) for record in self._state.instances.records()}
        for model, hardware in sorted(kinds):
            for tier in ("host", "storage"):
                if samples := self._state.prefill_observer.load_samples(model, hardware, tier):
                    family.add_metric([model, hardware, tier], samples)
        return family

    def _instances(self) -> Iterator[Metric]:
        state = self._state

        prediction_audit_failures = CounterMetricFamily(
            f"{NAME}prediction_audit_failures",
            "Times that an instance failed the prediction audit: persistently fewer cached tokens than predicted",
            labels=["instance"],
        )
        prediction_audit_failures.samples = _later(
            prediction_audit_failures.name + "_total",
            state.instances,
            lambda record: ({"instance": record.info.instance_id}, record.audit_failures),
        )
        yield prediction_audit_failures

        lives = GaugeMetricFamily(
            f"{NAME}instance_life",
            "1 for what the instance's requests show: in, or out (only requests on trial), and for which reason; also in against "
            "its agent (unhealthy) or without one (no_agent)",
            labels=["instance", "life", "reason"],
        )

        def life(record: InstanceRecord) -> tuple[dict[str, str], float]:
            word, reason = life_words(record)
            return {"instance": record.info.instance_id, "life": word, "reason": reason}, 1.0

        lives.samples = _later(lives.name, state.instances, life)
        yield lives

        def family(name: str, documentation: str, value: Callable[[InstanceRecord, str], float | None]) -> Metric:
            metric = GaugeMetricFamily(NAME + name, documentation, labels=["instance"])

            def sample(record: InstanceRecord) -> tuple[dict[str, str], float] | None:
                figure = value(record, record.info.instance_id)
                return None if figure is None else ({"instance": record.info.instance_id}, figure)

            metric.samples = _later(metric.name, state.instances, sample)
            return metric

        counters = state.reservations.counters
        refused = refused_senders(record.info for record in state.instances.records())
        yield family(
            "open_requests",
            "Open requests; each sequence of a request counts",
            lambda _, instance: counters(instance).num_requests,
        )
        yield family(
            "pending_prefill_tokens",
            "Prefill tokens not computed yet",
            lambda _, instance: counters(instance).pending_prefill_tokens,
        )
        yield family(
            "engine_prefill_tokens",
            "Tokens that the prompts in the engine's batch still need, as the engine reports them",
            lambda record, _: _of(record, "prefill_tokens_left"),
        )
        yield family("keys", "Block keys in the exact index", lambda _, instance: state.index.count(instance))
        yield family(
            "host_keys", "Block keys in host memory", lambda _, instance: state.lower_tiers.count(instance, Tier.HOST)
        )
        yield family(
            "storage_keys", "Block keys in storage", lambda _, instance: state.lower_tiers.count(instance, Tier.STORAGE)
        )
        yield family(
            "approximate_keys",
            "Block keys in the approximate index",
            lambda _, instance: state.prefix_knowledge.computed_prompts.count(instance),
        )
        yield family(
            "wrong_kv_senders",
            "Known instances that must not send KV to the instance, because their KV differed from its checksums",
            lambda _, instance: len(refused.get(instance, ())),
        )
        yield family(
            "report_age_seconds",
            "Time since the agent's last message",
            lambda record, _: self._clock() - record.heard_at,
        )
        yield family("running_requests", "Requests that the engine runs", lambda record, _: _of(record, "running"))
        yield family("waiting_requests", "Requests in the engine's queue", lambda record, _: _of(record, "waiting"))
        yield family(
            "kv_usage_ratio", "Share of the engine's KV blocks in use", lambda record, _: _of(record, "kv_usage")
        )
        yield family(
            "unknown_load_figures",
            "Figures of its load (running, waiting, KV usage) that the engine does not report; what needs them is off for it",
            lambda record, _: (
                None if record.load is None else len({"running", "waiting", "kv_usage"} & {*record.load.unknown})
            ),
        )


class _Samples:
    """An iterable of samples of instances that are read only while somebody iterates over them: those of a thousand instances,
    read at once, would block the event loop for up to 10 ms in each family. Instances that leave meanwhile are left out."""

    def __init__(
        self,
        name: str,
        instances: InstanceRegistry,
        read: Callable[[InstanceRecord], tuple[dict[str, str], float] | None],
    ) -> None:
        self._name = name
        self._instances = instances
        self._read = read

    def __iter__(self) -> Iterator[Sample]:
        for record in self._instances.records():
            known = self._instances.get(record.info.instance_id) is record
            if known and (read := self._read(record)) is not None:
                yield Sample(self._name, *read)


def _later(
    name: str, instances: InstanceRegistry, read: Callable[[InstanceRecord], tuple[dict[str, str], float] | None]
) -> list[Sample]:
    """Return the samples called `name` of all instances, made by `read` (labels and value; None: none) while they are iterated
    over."""
    return cast(list[Sample], _Samples(name, instances, read))


def life_words(record: InstanceRecord) -> tuple[str, str]:
    """Return "in" or "out" by an instance's life, and the reason as one word; empty for an instance that is in as usual."""
    if record.life.opened:
        return "out", record.life.cause
    if record.lost_at is not None:
        return "in", "no_agent"
    return "in", "unhealthy" if record.underlying_state is InstanceState.UNHEALTHY else ""


def _of(record: InstanceRecord, figure: str) -> float | None:
    return None if record.load is None else getattr(record.load, figure)

"""Monitoring of one engine address: identity, properties and load of the engine, with one InstanceMonitor per data-parallel
rank."""

from __future__ import annotations

import asyncio
import math
import socket
import ssl
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import structlog

from pointsman.agent.v1 import agent_pb2 as pb
from pointsman_agent.core.engine_address import EngineAddress
from pointsman_agent.core.engine_life import EngineLife
from pointsman_agent.core.engine_metrics import EXTERNAL_FIGURES, FIGURES, Sample, Scrape, WrongSender
from pointsman_agent.core.kv_transfer_support import kv_transfer
from pointsman_agent.core.process_identity import IdentityChange, ProcessIdentity
from pointsman_agent.core.step_load import StepLoad
from pointsman_agent.core.suspension import CacheResets, suspension
from pointsman_agent.core.warning_limit import WarningLimit
from pointsman_agent.io.engine_http import EngineProbe, KvEventSources, ProbeError, ServedModels
from pointsman_agent.io.gpu import GpuSampler
from pointsman_agent.io.instance_monitor import AgentContext, InstanceMonitor, new_incarnation
from pointsman_common.core.engine_identity_wire import identity_to_wire
from pointsman_common.core.printable import printable

log = structlog.get_logger()

# Number of consecutive failed scrapes after which it is logged that an engine's load is unknown.
LOAD_UNKNOWN_AFTER = 2
# Number of consecutive scrapes that lack a rank after which the rank is gone. A page can be incomplete.
RANKS_GONE_AFTER = 3
# Maximum interval between two scrapes of an engine that does not answer, s. It may be back, or its name may have moved.
MAX_SCRAPE_PAUSE_S = 2.0
# Time after a pushed step load during which a scrape does not replace what the step load says, s.
STEP_LOAD_COUNTS_S = 2.0
# Time after the last step load after which an engine that generates tokens pushes none any more, s.
STEP_LOADS_ENDED_S = 10.0
# Minimum interval between two step loads sent to the routers, s: at most 20 a second for each instance of a fleet.
STEP_LOAD_INTERVAL_S = 0.05
# Interval between two reads of models and adapters, s. Adapters are loaded and unloaded at run time.
DESCRIBE_EVERY_S = 15.0
# The same for an engine that has had adapters, s: requests for an adapter that was unloaded fail until it is noticed.
DESCRIBE_ADAPTERS_EVERY_S = 2.0
# Part of the scrape interval in which a rank's last step counts as its sign of life.
FRESH_SHARE = 0.5
# Minimum interval between two logged faults of an engine's scrapes, s. An engine that causes one may do so at each scrape.
FAULT_INTERVAL_S = 60.0
# Minimum interval between two warnings of one series of an engine that is missing or no number, s.
SERIES_INTERVAL_S = 3600.0
# Why requests are not placed on an engine that lives and answers 503 to all of them.
UNAVAILABLE = "its API answers 503 (its data-parallel ranks change, or it is paused)"
NOT_READY = "its endpoint is not ready"
NOT_SCRAPED = "not scraped yet"
# Maximum wait of a scrape for the answer of GET /is_paused, s. A scheduler answers between two steps.
PAUSE_ANSWER_S = 0.2


class EngineMonitor:
    """Monitors one address until its task is cancelled. `gpus` are the indices of the devices whose samples are reported with its
    instances. `tls` has the trusted authorities for an HTTPS address (None: the system's)."""

    def __init__(
        self,
        address: EngineAddress,
        agent_context: AgentContext,
        *,
        scrape_interval_s: float,
        api_key: str,
        tls: ssl.SSLContext | None,
        gpus: tuple[int, ...],
        sampler: GpuSampler,
    ) -> None:
        self.address = address
        self.instances: dict[int, InstanceMonitor] = {}
        """By data-parallel rank in the whole deployment (the `engine` label)."""
        self.ambiguous_address = False
        """Whether several processes answer at the address (a load balancer)."""
        self.scrapes = 0
        self.scrape_failures = 0
        self.step_loads = 0
        self._agent_context = agent_context
        self._interval = scrape_interval_s
        self._api_key = api_key
        self._tls = tls
        self._gpus = gpus
        self._sampler = sampler
        self._identity = ProcessIdentity()
        self._life = EngineLife(time.monotonic())
        self._was_healthy = True
        self._ready = True
        # Number of failed scrapes in a row, and why the last one failed, or gave no instances.
        self._failures = 0
        self._scrape_problem = NOT_SCRAPED
        # Why the engine refuses all requests, by what it answered last.
        self._unavailable = ""
        self._faults = WarningLimit(FAULT_INTERVAL_S)
        self._series: defaultdict[str, WarningLimit] = defaultdict(lambda: WarningLimit(SERIES_INTERVAL_S))
        # The last load of each rank, and when its scrape was answered.
        self._last_loads: dict[int, tuple[pb.Load, float]] = {}
        self._reported: tuple[object, ...] = ()
        self._reported_at = -math.inf
        self._scrapes_without_ranks = 0
        self._described_at = 0.0
        self._had_adapters = False
        self._cache_resets = CacheResets()
        # The last answer of GET /is_paused; None if the engine has no such route.
        self._paused: bool | None = False
        self._pause_query: asyncio.Task[bool | None] | None = None
        # Whether /is_paused, like all other routes but /metrics, was answered 503 last.
        self._pause_refused = False
        self._announced: tuple[Mapping[str, str], Mapping[str, str], Mapping[WrongSender, int]] = ({}, {}, {})
        # By data-parallel rank as in the instances' description; without those that are unknown.
        self._engine_ids: Mapping[int, str] = {}
        self._run = ""
        self._last_step = -math.inf
        # The engine's counter of generated tokens, and when it last changed.
        self._generated: int | None = None
        self._generated_at = -math.inf
        self._newest_steps: dict[int, tuple[StepLoad, float]] = {}
        self._to_forward: set[int] = set()
        self._pushing: asyncio.TimerHandle | None = None
        self._stopping: set[asyncio.Task[None]] = set()
        self._goodbye = ""
        self._log = log.bind(engine=address.url)

    async def run(self) -> None:
        """Scrape the engine periodically until cancelled. The cancellation saves the instances' state and stops them; after
        leave() they end."""
        try:
            async with EngineProbe(self.address, api_key=self._api_key, tls=self._tls) as probe:
                probing = asyncio.create_task(self._probe_life(probe), name=f"probe {self.address.url}")
                try:
                    while True:
                        began = time.monotonic()
                        await self._scrape(probe)
                        pause = (
                            self._interval
                            if self._failures == 0
                            else min(MAX_SCRAPE_PAUSE_S, self._interval * self._failures)
                        )
                        await self._pause(began + pause - time.monotonic())
                finally:
                    probing.cancel()
                    await asyncio.wait({probing})
        finally:
            self._forget_pause()
            await self._stop(self._goodbye)

    @property
    def healthy(self) -> bool:
        """Whether requests can be sent to the engine: it is described, lives, and is ready."""
        return bool(self.instances) and self._life.healthy and self._ready

    @property
    def absent(self) -> bool:
        """Whether the engine has no instance, for another reason than that it has not been scraped yet."""
        return not self.instances and self._scrape_problem != NOT_SCRAPED

    @property
    def problem(self) -> str:
        """Why nothing is reported, the engine is unhealthy, or its load is not known; empty if there is no problem."""
        if not self._life.healthy:
            return self._life.problem
        if not self._ready:
            return NOT_READY
        if self._scrape_problem and self.instances:
            return f"load unknown: {self._scrape_problem}"
        return self._scrape_problem or self._steps_problem()

    def set_ready(self, ready: bool) -> None:
        """Set whether the engine's readiness probe passes. Its instances and their keys stay while it does not. Mutates."""
        if ready != self._ready:
            self._ready = ready
            self._report_life()

    def leave(self, reason: str) -> None:
        """Make the end of run() the end of the instances, too: the engine does not come back."""
        self._goodbye = reason

    def is_from_this_engine(self, load: StepLoad) -> bool:
        """Return whether a pushed load is of this engine, as it answered the last scrape."""
        return bool(load.run) and load.run == self._run and load.rank in self.instances

    def step_load_received(self, load: StepLoad) -> None:
        """Record a load that this engine pushed, and forward it to the routers, at most every STEP_LOAD_INTERVAL_S."""
        self.step_loads += 1
        self._last_step = time.monotonic()
        self._life.sign(self._last_step)
        self._newest_steps[load.rank] = (load, self._last_step)
        self._to_forward.add(load.rank)
        if self._pushing is None:
            self._forward_step_loads()

    def _forward_step_loads(self) -> None:
        """Send the newest pushed loads to the routers, and schedule the next call for loads that arrive meanwhile."""
        self._pushing = None
        if not self._to_forward:
            return
        for rank in self._to_forward:
            load, taken_at = self._newest_steps[rank]
            if rank in self.instances:
                scraped, _ = self._last_loads.get(rank, (None, taken_at))
                self._last_loads[rank] = load.to_wire(scraped), taken_at
                self._report_load(rank)
        self._to_forward.clear()
        self._pushing = asyncio.get_running_loop().call_later(STEP_LOAD_INTERVAL_S, self._forward_step_loads)

    async def _probe_life(self, probe: EngineProbe) -> None:
        """Probe the engine's life periodically until cancelled, apart from scrapes, and report what changes."""
        while True:
            began = time.monotonic()
            if not self._shows_life(began):
                await self._probe(probe)
            self._report_life()
            await asyncio.sleep(max(began + self._interval - time.monotonic(), 0.0))

    def _shows_life(self, now: float) -> bool:
        """Return whether GET /health would tell nothing new: the engine's HTTP server answers scrapes, and all of its ranks have
        just shown a step, by a load that they pushed or by a KV event."""
        if self._failures or self._life.problem or not self.instances:
            return False
        since = now - FRESH_SHARE * self._interval
        return all(
            max(instance.events_at, self._newest_steps.get(rank, (None, -math.inf))[1]) > since
            for rank, instance in self.instances.items()
        )

    async def _probe(self, probe: EngineProbe) -> None:
        try:
            await probe.alive()
        except ProbeError as error:
            for instance in self.instances.values():
                self._life.sign(instance.events_at)
            if error.status:
                self._life.said_dead(str(error), time.monotonic())
            else:
                self._life.silent(str(error), time.monotonic(), refused=error.refused)
        # As for scrapes: no answer may end the agent.
        except Exception as error:
            self._life.silent(self._fault("a probe of the engine failed in the agent", error), time.monotonic())
        else:
            self._life.probed(time.monotonic())

    def _report_life(self) -> None:
        """Report the last loads again if what is reported with them has changed, or if no scrape has succeeded for a while."""
        if self._life.healthy is not self._was_healthy:
            self._was_healthy = self._life.healthy
            if self._life.healthy:
                self._log.warning("the engine answers again")
            else:
                self._log.warning("the engine does not answer", reason=self._life.problem)
        now = time.monotonic()
        if self._state() != self._reported or now - self._reported_at > 1.5 * self._interval:
            for rank in self._last_loads:
                self._report_load(rank)

    def _state(self) -> tuple[object, ...]:
        return self.healthy, self.problem, self._unavailable

    def _report_load(self, rank: int) -> None:
        """Send the last load of a rank, as old as it is, with the engine's health as it is now."""
        instance, last = self.instances.get(rank), self._last_loads.get(rank)
        if instance is None or last is None:
            return
        load = pb.Load()
        load.CopyFrom(last[0])
        load.healthy, load.problem = self.healthy, self.problem
        load.suspended = self._unavailable or load.suspended
        before = instance.suspended
        instance.report_load(load, last[1])
        self._reported, self._reported_at = self._state(), time.monotonic()
        if load.suspended != before:
            self._log.info(
                "the engine is suspended" if load.suspended else "the engine computes", rank=rank, reason=load.suspended
            )

    def _fault(self, event: str, error: Exception) -> str:
        """Log a fault of the agent's own, and return what is reported of it. Its text may quote what the engine sent."""
        if times := self._faults.occurred(time.monotonic()):
            self._log.error(event, times=times, exc_info=error)
        return printable(f"{type(error).__name__} in its agent: {error}")

    async def _pause(self, seconds: float) -> None:
        """Wait until the next scrape; less if an instance's monitor ends before."""
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        waits = [
            asyncio.ensure_future(instance.ended.wait())
            for instance in self.instances.values()
            if not instance.ended.is_set()  # else it ends with the next scrape that describes its next incarnation
        ]
        if not waits:
            await asyncio.sleep(seconds)
            return
        try:
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def _scrape(self, probe: EngineProbe) -> None:
        try:
            await self._report_scrape(probe)
        except ProbeError as error:
            if error.status:
                self._life.sign(time.monotonic())
            self._unavailable = UNAVAILABLE if error.status == 503 and await self._refuses_all(probe) else ""
            self._scrape_failed(str(error))
        # The other engines share the agent, so no answer of this one may end it.
        except Exception as error:
            self._scrape_failed(self._fault("a scrape of the engine failed in the agent", error))
        if self.instances and self._life.gone(time.monotonic()):
            # Gateways may reach it all the same: its routers decide by what it answers to them.
            await self._stop("the engine stopped answering", goodbye=False)

    async def _refuses_all(self, probe: EngineProbe) -> bool:
        try:
            return await probe.unavailable()
        except ProbeError:
            return False

    async def _report_scrape(self, probe: EngineProbe) -> None:
        """Scrape the engine and report what it answers. Raises ProbeError."""
        scrape = await probe.scrape()
        taken_at = time.monotonic()
        self.scrapes += 1
        self._life.sign(taken_at)
        self._name_series(scrape)
        await self._update_instances(probe, scrape)
        sleeps = self._cache_resets.sleeps(scrape)
        late = not await self._read_pause(probe, sleeps=sleeps) and not sleeps
        self._unavailable = UNAVAILABLE if self._pause_refused else ""
        if self.ambiguous_address:
            return
        paused = bool(self._paused)
        reset = self._cache_resets.observe(scrape, paused=paused)
        for instance in self.instances.values():
            if reset is not None:
                instance.cache_was_reset(reset, late=late)
            elif not late:
                instance.cache_is_known()
        gpus = await asyncio.to_thread(self._sampler.sample, self._gpus) if self._gpus else []
        if self._failures >= LOAD_UNKNOWN_AFTER:
            self._log.warning("the engine's load is known again", failures=self._failures)
        self._failures, self._scrape_problem = 0, ""
        for rank in self.instances:
            if (sample := scrape.ranks.get(rank)) is not None:
                load = _load(sample, gpus, suspension(sample, scrape, paused=paused))
                steps, stepped_at = self._newest_steps.get(rank, (None, -math.inf))
                if steps is not None and taken_at - stepped_at < STEP_LOAD_COUNTS_S:
                    # The engine's HTTP server may show an earlier step.
                    load = steps.to_wire(load)
                self._last_loads[rank] = load, taken_at
                self._report_load(rank)

    def _name_series(self, scrape: Scrape) -> None:
        """Log, once in a while for each, the series that are no numbers, and the figures that the page does not have."""
        now = time.monotonic()
        for series, reason in scrape.bad.items():
            if times := self._series[series].occurred(now):
                self._log.warning(
                    "a series of /metrics is no number, and counts as unknown",
                    series=series,
                    reason=reason,
                    times=times,
                )
        missing = sorted({name for sample in scrape.ranks.values() for name in sample.unknown} - EXTERNAL_FIGURES)
        if missing and self._series[" ".join(missing)].occurred(now):
            self._log.warning(
                "the engine's /metrics does not tell its load fully; what needs it is off", unknown=missing
            )

    def _steps_problem(self) -> str:
        """Return that an engine which pushed step loads has ended that while it generates tokens, as vLLM's Rust front end, which
        loads no stat loggers; "" otherwise."""
        if self._generated_at - self._last_step < STEP_LOADS_ENDED_S or not math.isfinite(self._last_step):
            return ""
        return "the engine's step loads have ended: its load is read from /metrics"

    async def _read_pause(self, probe: EngineProbe, *, sleeps: bool) -> bool:
        """Update whether the engine is paused; return whether that is known as of now. An answer that is late counts at a later
        scrape, so that loads are not delayed. But it does not count if the engine has slept meanwhile: a sleeping engine answers
        that it is paused."""
        if self._paused is None or not self.instances:
            return True
        if sleeps and self._pause_query is not None:
            self._pause_query.cancel()
            self._pause_query = None
        asked_now = self._pause_query is None
        if self._pause_query is None:
            self._pause_query = asyncio.create_task(self._query_pause(probe))
        await asyncio.wait({self._pause_query}, timeout=PAUSE_ANSWER_S)
        if not self._pause_query.done():
            return False
        query, self._pause_query = self._pause_query, None
        self._paused = query.result()
        return asked_now

    async def _query_pause(self, probe: EngineProbe) -> bool | None:
        try:
            paused = await probe.paused()
        except ProbeError as error:
            self._log.debug("the engine does not answer whether it is paused", reason=str(error))
            # That is no pause, after which the cache counts as reset.
            self._pause_refused = error.status == 503 and await self._refuses_all(probe)
            return self._paused
        self._pause_refused = False
        return paused

    def _forget_pause(self) -> None:
        """Forget what is known of another process, or at the end."""
        if self._pause_query is not None:
            self._pause_query.cancel()
        self._pause_query, self._paused, self._cache_resets = None, False, CacheResets()
        self._pause_refused = False

    async def _update_instances(self, probe: EngineProbe, scrape: Scrape) -> None:
        """Update `instances` to those of the process that answered. Raises ProbeError."""
        tokens = queries = None
        # The sums over fewer ranks would look like those of another process.
        if self.instances.keys() <= scrape.ranks.keys():
            tokens = _total(sample.generation_tokens for sample in scrape.ranks.values())
            queries = _total(sample.prefix_cache_queries for sample in scrape.ranks.values())
        if tokens is not None and tokens != self._generated:
            self._generated, self._generated_at = tokens, time.monotonic()
        seen = self._identity.observe(scrape.process_start, tokens, queries, run=scrape.run)
        self._run = scrape.run
        if seen is IdentityChange.ALTERNATING:
            self._scrape_problem = (
                "the address answers for several processes (a load balancer?): give each engine's own address"
            )
            if not self.ambiguous_address:
                self._log.error("the engine's address is ambiguous", reason=self._scrape_problem)
                await self._stop(self._scrape_problem)
            self.ambiguous_address = True
            return
        self.ambiguous_address = False
        for instance in self.instances.values() if seen is IdentityChange.NEW else ():
            instance.end("another process answers")
        if any(instance.ended.is_set() for instance in self.instances.values()):
            await self._start_instances(probe, scrape, saw_start=True)
        elif self._ranks_changed(scrape):
            await self._stop("its data-parallel ranks changed" if self.instances else "")
            await self._start_instances(probe, scrape, saw_start=False)
        elif self.instances.keys() == scrape.ranks.keys() and (
            _announced(scrape) != self._announced or self._models_are_due()
        ):
            try:
                await self._describe_again(probe, scrape)
            except ProbeError as error:
                # Its load counts all the same.
                self._log.warning("the engine's models cannot be read again", reason=str(error))
                self._described_at = time.monotonic()

    def _ranks_changed(self, scrape: Scrape) -> bool:
        """Return whether the engine has other ranks than its instances. Mutates."""
        if self.instances.keys() <= scrape.ranks.keys():
            self._scrapes_without_ranks = 0
            return self.instances.keys() != scrape.ranks.keys()
        self._scrapes_without_ranks += 1
        return self._scrapes_without_ranks >= RANKS_GONE_AFTER

    def _models_are_due(self) -> bool:
        if any(instance.instance.lora_names for instance in self.instances.values()):
            self._had_adapters = True
        interval_s = DESCRIBE_ADAPTERS_EVERY_S if self._had_adapters else DESCRIBE_EVERY_S
        return time.monotonic() - self._described_at >= interval_s

    async def _start_instances(self, probe: EngineProbe, scrape: Scrape, *, saw_start: bool) -> None:
        """Start to report the engine's instances. Those that are reported already have ended. They stay at routers until their
        next incarnations are reported, so that a model with one engine is not unknown meanwhile."""
        ranks = sorted(scrape.ranks)
        models = await probe.models()
        if any(instance.instance.model != models.served_names[0] for instance in self.instances.values()):
            await self._stop("another model is served")
        version = await probe.version()
        sources = await probe.sources(ranks)
        self._engine_ids = await self._query_engine_ids(probe, scrape)
        self._forget_pause()
        self._described_at, self._announced = time.monotonic(), _announced(scrape)
        process = "" if self._identity.anonymous else self._identity.current
        same_process = any(instance.process == process for instance in self.instances.values())
        started: dict[int, InstanceMonitor] = {}
        try:
            for rank in ranks:
                sample = scrape.ranks[rank]
                if not sample.cache_config:
                    raise ProbeError("no vllm:cache_config_info in /metrics")
                instance = self._instance(rank, ranks, sample, scrape, models, version)
                self._describe_kv_transfer(instance, scrape, rank)
                instance.incarnation = new_incarnation(process) if same_process else process
                source = sources.by_rank.get(rank)
                if reason := _no_prefix(sample, sources, rank):
                    instance.prefix_mode, instance.prefix_reason, source = pb.PREFIX_MODE_NONE, reason, None
                started[rank] = InstanceMonitor(
                    self._agent_context,
                    instance,
                    source,
                    process=process,
                    capacity_blocks=sample.kv_blocks,
                    speculative=sample.speculative,
                    saw_start=saw_start,
                )
            # All at once: one whose replay does not answer takes seconds.
            for prepared in await asyncio.gather(
                *(monitor.prepare() for monitor in started.values()), return_exceptions=True
            ):
                if isinstance(prepared, BaseException):
                    raise prepared
        except BaseException as error:
            # The next scrape starts anew.
            for monitor in started.values():
                await monitor.stop(f"it could not be followed: {error}")
            raise
        await self._stop("", replaced_by={monitor.instance.instance_id for monitor in started.values()})
        self.instances = started
        for monitor in started.values():
            monitor.start()

    def _instance(
        self, rank: int, ranks: Sequence[int], sample: Sample, scrape: Scrape, models: ServedModels, version: str
    ) -> pb.Instance:
        several = len(ranks) > 1
        return pb.Instance(
            instance_id=self.address.instance_id(rank if several else None),
            url=self.address.advertise,
            model=models.served_names[0],
            served_names=models.served_names,
            lora_names=models.lora_names,
            model_root=scrape.tokenizer_place(models.root),
            block_size=sample.block_size,
            kv_capacity_tokens=sample.kv_capacity_tokens,
            max_model_len=models.max_model_len,
            # The `engine` label is the rank in the whole deployment. vLLM's API server reads the header as the index among the
            # ranks that it serves. These differ on each node but the first with hybrid load balancing.
            data_parallel_rank=ranks.index(rank) if several else None,
            prefix_mode=pb.PREFIX_MODE_EXACT,
            engine_version=version,
            node=socket.gethostname(),
            hardware=self.address.hardware or scrape.hardware or self._sampler.hardware(self._gpus, len(ranks)),
            long_prefill_token_threshold=(
                self.address.long_prefill_token_threshold or scrape.long_prefill_token_threshold
            ),
            shared_storage=self.address.storage,
            kv_token_bytes=scrape.kv_token_bytes,
            identity=identity_to_wire(scrape.identity(models.root, rank)),
            max_num_seqs=scrape.max_num_seqs,
        )

    async def _describe_again(self, probe: EngineProbe, scrape: Scrape) -> None:
        models = await probe.models()
        # A restart is always noticed if the process says who it is.
        if self._identity.anonymous or len(self._engine_ids) < len(self.instances):
            self._engine_ids = await self._query_engine_ids(probe, scrape)
        self._described_at, self._announced = time.monotonic(), _announced(scrape)
        for rank, instance in self.instances.items():
            before = instance.instance
            after = pb.Instance()
            after.CopyFrom(before)
            # The pool's name is not updated, because it is part of every key.
            after.served_names[:] = models.served_names
            after.lora_names[:] = models.lora_names
            after.model_root = scrape.tokenizer_place(models.root)
            after.max_model_len, after.max_num_seqs = models.max_model_len, scrape.max_num_seqs
            after.ClearField("identity")
            after.MergeFrom(pb.Instance(identity=identity_to_wire(scrape.identity(models.root, rank))))
            # A restart of a process that does not report its start time may be undetected, so the KV transfer support may differ.
            self._describe_kv_transfer(after, scrape, rank)
            if after == before:
                continue
            self._log.info(
                "the engine's models or KV transfer support have changed",
                lora_names=models.lora_names,
                passes_kv_on=after.HasField("kv_transfer"),
                wrong_kv_from=[sender.engine_id or sender.bootstrap_url for sender in after.kv_transfer.wrong_from],
            )
            instance.describe(after)

    def _describe_kv_transfer(self, instance: pb.Instance, scrape: Scrape, rank: int) -> None:
        instance.ClearField("kv_transfer")
        kv = kv_transfer(
            self.address,
            scrape.kv_transfer,
            scrape.ranks[rank].cache_config.get("cache_dtype", ""),
            scrape.wrong_kv,
            rank=rank,
            # The field is 0 if the engine has one rank only.
            engine_id=self._engine_ids.get(instance.data_parallel_rank, ""),
        )
        if kv is not None:
            instance.kv_transfer.CopyFrom(kv)

    async def _query_engine_ids(self, probe: EngineProbe, scrape: Scrape) -> Mapping[int, str]:
        kv = kv_transfer(self.address, scrape.kv_transfer, "")
        if kv is None or not kv.bootstrap_url or kv.role == pb.KV_ROLE_CONSUMER:
            return {}
        return await probe.engine_ids(kv.bootstrap_url)

    def _scrape_failed(self, reason: str) -> None:
        self.scrape_failures += 1
        self._failures += 1
        self._identity.unreachable()
        self._scrape_problem = reason
        if self._failures == LOAD_UNKNOWN_AFTER and self._life.healthy:
            self._log.warning("the engine's load is unknown", reason=reason)
        self._report_life()

    async def _stop(self, reason: str, replaced_by: Collection[str] = (), *, goodbye: bool = True) -> None:
        """Stop all instances. `reason`: why they end; empty: the engine still runs. `replaced_by`: ids of instances that are
        reported next. `goodbye`: whether routers remove the others. A cancellation does not interrupt the stops: the next call,
        at the latest that at the end of `run`, waits for them."""
        instances, self.instances = self.instances, {}
        self._last_loads.clear()
        self._newest_steps.clear()
        self._to_forward.clear()
        for instance in instances.values():
            leaves = bool(reason or replaced_by) and instance.instance.instance_id not in replaced_by
            stop = instance.stop(reason or instance.end_reason, goodbye=goodbye and leaves)
            self._stopping.add(asyncio.create_task(stop))
        if not self._stopping:
            return
        await asyncio.wait(self._stopping)
        stopped, self._stopping = self._stopping, set()
        for task in stopped:
            task.result()


def _no_prefix(sample: Sample, sources: KvEventSources, rank: int) -> str:
    """Return why the keys of a rank cannot be known; "" if they can."""
    if sample.cache_config.get("enable_prefix_caching") == "False":
        return "the engine runs without prefix caching"
    if sources.reason:
        return sources.reason
    return "" if rank in sources.by_rank else f"the engine publishes no KV events for rank {rank}"


def _announced(scrape: Scrape) -> tuple[Mapping[str, str], Mapping[str, str], Mapping[WrongSender, int]]:
    """Return what changes an instance's description when it changes."""
    return scrape.kv_transfer, scrape.announced_identity, scrape.wrong_kv


def _total(counts: Iterable[int | None]) -> int | None:
    """Return the sum; None if a part of it is unknown."""
    known = list(counts)
    return None if None in known else sum(filter(None, known))


def _load(sample: Sample, gpus: list[pb.Gpu], suspended: str) -> pb.Load:
    figures: dict[str, Any] = {name: getattr(sample, name) for name in FIGURES}
    return pb.Load(**figures, unknown=sample.unknown, gpus=gpus, suspended=suspended)

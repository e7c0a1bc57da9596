"""Compares two modelled fleets for each model, keeps the totals, and writes the output files."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec

from pointsman_common.core.block_keys import KEY_TOKENS
from pointsman_common.io.settings import InvalidSetting
from pointsman_lab.engine.cost_profile import Profile, load_profile
from pointsman_lab.engine.interface import EngineConfig
from pointsman_lab.rival_policies.registry import make_policy
from pointsman_lab.simulation.config import SimulationConfig
from pointsman_lab.simulation.counterfactual import ObservedRequest, PairedFleets, PlacementTotals, RequestPair
from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.policy.base import SettingError
from pointsman_router.core.policy.registry import place_of
from pointsman_router.io.telemetry.decision_log import DecisionLog
from pointsman_shadow.io.settings import ModelSettings

# Default capacity of an engine's KV cache, tokens. It is that of the engines of `pointsman simulate`.
KV_TOKENS = 320_000


@dataclass(frozen=True)
class ModelEngines:
    """The engines of one model: their names, and the KV cache capacity and maximum context of each, in tokens (0: unknown)."""

    names: tuple[str, ...]
    kv_capacity_tokens: int = 0
    max_model_len: int = 0


class PlacementComparison:
    """Compares the requests that it observes. observe() and finish() run a simulation, so they can take long. They may run in a
    different thread than the other methods."""

    def __init__(self, settings: ModelSettings, on_compared: Callable[[RequestPair], None] | None = None) -> None:
        """Raises ValueError if the profile cannot be read, InvalidSetting if a policy does not exist, OSError if a file cannot be
        written."""
        for field, values in (("policy", settings.policy_map()), ("assumed", {})):
            try:
                make_policy(getattr(settings, field), values)
            except SettingError as error:
                raise InvalidSetting(
                    settings, place_of(error, values, field, "policy_settings"), error.sentence
                ) from None
        self._settings = settings
        self._profile = load_profile(settings.profile) if settings.profile else Profile()
        self._on_compared = on_compared
        self._fleets: dict[str, PairedFleets] = {}
        self._totals: dict[str, PlacementTotals] = {}
        self._record = _appending(settings.record)
        self._compared = _appending(settings.compared)
        self._decisions = DecisionLog(1, settings.decisions) if settings.decisions else None
        self._begin_s: dict[str, float] = {}
        self._lock = threading.Lock()

    def add_engines(self, model: str, engines: ModelEngines) -> None:
        """Set the engines that serve a model. Ignored after the model's first observed request. Raises ValueError for settings
        that do not fit together. Mutates."""
        if model in self._begin_s:
            return
        settings = self._settings
        kv_capacity_tokens = settings.kv_capacity_tokens or engines.kv_capacity_tokens or KV_TOKENS
        simulation = SimulationConfig(
            instances=len(engines.names),
            names=engines.names,
            policy=settings.policy,
            policy_settings=settings.policy_map(),
            prompts_include_answers=settings.prompts_include_answers,
            engine=EngineConfig(
                kv_blocks=kv_capacity_tokens // KEY_TOKENS,
                max_model_len=min(
                    settings.max_model_len or engines.max_model_len or kv_capacity_tokens,
                    kv_capacity_tokens // KEY_TOKENS * KEY_TOKENS,
                ),
                max_num_batched_tokens=settings.max_num_batched_tokens,
            ),
            profile=self._profile,
        )
        fleets = PairedFleets(simulation, settings.assumed, self._tell_decisions(model))
        with self._lock:
            self._fleets[model] = fleets
            self._totals[model] = PlacementTotals()

    def engines_of(self, model: str) -> tuple[str, ...]:
        """Return the names of a model's engines; none if the model is not known."""
        fleets = self._fleets.get(model)
        return fleets.names if fleets else ()

    @property
    def open(self) -> int:
        """Number of requests that have not ended in both fleets of their model."""
        return sum(fleets.open for fleets in self._fleets.values())

    def summaries(self) -> dict[str, dict[str, Any]]:
        """Return the figures of each model (PlacementTotals.summary)."""
        with self._lock:
            return {
                model: {"engines": list(self._fleets[model].names)} | totals.summary()
                for model, totals in self._totals.items()
            }

    def observe(self, request: ObservedRequest) -> None:
        """Add the next request to both fleets. Raises KeyError for a model without add_engines(). Mutates."""
        fleets = self._fleets[request.model]
        self._begin_s.setdefault(request.model, request.timestamp_ms / 1e3)
        if self._record is not None:
            self._record.write(msgspec.json.encode(request) + b"\n")
        for pair in fleets.submit(request):
            self._note(pair)

    def finish(self) -> None:
        """Simulate until all requests have ended, and close the files. Mutates."""
        for fleets in self._fleets.values():
            for pair in fleets.finish():
                self._note(pair)
        for file in (self._record, self._compared, self._decisions):
            if file is not None:
                file.close()

    def _note(self, pair: RequestPair) -> None:
        with self._lock:
            self._totals[pair.request.model].add(pair)
        if self._compared is not None:
            self._compared.write(msgspec.json.encode(line_of(pair)) + b"\n")
        if self._on_compared is not None:
            self._on_compared(pair)

    def _tell_decisions(
        self, model: str
    ) -> Callable[[ev.DecisionMade | ev.DecisionNoted | ev.DecisionClosed, float], None] | None:
        decisions = self._decisions
        if decisions is None:
            return None

        def tell(effect: ev.DecisionMade | ev.DecisionNoted | ev.DecisionClosed, now: float) -> None:
            unix_s = self._begin_s[model] + now
            match effect:
                case ev.DecisionMade(decision):
                    decisions.decided(decision, unix_s, 0.0)
                case ev.DecisionNoted(decision, note):
                    decisions.noted(decision.decision_id, note, unix_s)
                case ev.DecisionClosed(decision_id, finished):
                    decisions.closed(decision_id, finished, unix_s)

        return tell


def line_of(pair: RequestPair) -> dict[str, Any]:
    """Return a compared request as JSON, without its blocks. Times are in s; `at` is unix time."""
    request = pair.request
    return {
        "id": request.request_id,
        "at": request.timestamp_ms / 1e3,
        "model": request.model,
        "session": request.session,
        "input_tokens": request.input_length,
        "instance": request.instance,
        "engine_said_cached_tokens": request.cached_tokens,
        **{
            kind: {
                "instance": record.instance,
                "cached_tokens": record.cached_tokens,
                "ttft_s": record.ttft_s,
                "decision": record.decision,
                "reason": record.reason,
            }
            for kind, record in (("recorded", pair.recorded), ("counterfactual", pair.counterfactual))
        },
    }


def _appending(path: Path | None) -> IO[bytes] | None:
    if path is None:
        return None
    with suppress(FileExistsError):
        path.parent.mkdir(parents=True)
    return path.open("ab", buffering=0)

"""The comparison as it goes on: twins for each model, their totals, and the files that are written meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec

from lab.counterfactual import Compared, Observed, Totals, Twins
from lab.engine_events import EngineConfig
from lab.profile import Profile, load_profile
from lab.simulation import Simulation
from services.common.keys import KEY_TOKENS
from services.router import events as ev
from services.router.io.decision_log import DecisionLog
from services.router.policy.registry import make_policy
from services.shadow.settings import ModelSettings

# The cache of `pointsman simulate`'s engines.
KV_TOKENS = 320_000


@dataclass(frozen=True)
class Engines:
    """The engines of one model: their names, and in tokens what each one's cache holds and the longest context (0: unknown)."""

    names: tuple[str, ...]
    kv_tokens: int = 0
    max_model_len: int = 0


class Study:
    """Compares requests as they are observed. observe() and finish() may take long, a simulation goes on in them, and may run in
    another thread than the rest."""

    def __init__(self, settings: ModelSettings, on_compared: Callable[[Compared], None] | None = None) -> None:
        """Raises ValueError for a profile that cannot be read and a policy that does not exist, OSError for files that cannot be
        written."""
        make_policy(settings.policy, settings.policy_map())
        make_policy(settings.assumed, {})
        self._settings = settings
        self._profile = load_profile(settings.profile) if settings.profile else Profile()
        self._on_compared = on_compared
        self._twins: dict[str, Twins] = {}
        self._totals: dict[str, Totals] = {}
        self._record = _appending(settings.record)
        self._compared = _appending(settings.compared)
        self._decisions = DecisionLog(1, settings.decisions) if settings.decisions else None
        self._begin_s: dict[str, float] = {}
        self._lock = threading.Lock()

    def add_engines(self, model: str, engines: Engines) -> None:
        """The engines that serve a model; others than before are taken as long as no request of it was observed. Raises
        ValueError for settings that do not go together. Mutates."""
        if model in self._begin_s:
            return
        settings = self._settings
        kv_tokens = settings.kv_tokens or engines.kv_tokens or KV_TOKENS
        simulation = Simulation(
            instances=len(engines.names),
            names=engines.names,
            policy=settings.policy,
            policy_settings=settings.policy_map(),
            answers_return=settings.answers_return,
            engine=EngineConfig(
                kv_blocks=kv_tokens // KEY_TOKENS,
                max_model_len=min(
                    settings.max_model_len or engines.max_model_len or kv_tokens, kv_tokens // KEY_TOKENS * KEY_TOKENS
                ),
                max_num_batched_tokens=settings.max_num_batched_tokens,
            ),
            profile=self._profile,
        )
        twins = Twins(simulation, settings.assumed, self._tell_decisions(model))
        with self._lock:
            self._twins[model] = twins
            self._totals[model] = Totals()

    def engines_of(self, model: str) -> tuple[str, ...]:
        """The names of a model's engines; none when it is not known."""
        twins = self._twins.get(model)
        return twins.names if twins else ()

    @property
    def open(self) -> int:
        """Requests that have not ended in both fleets of their model."""
        return sum(twins.open for twins in self._twins.values())

    def summaries(self) -> dict[str, dict[str, Any]]:
        """The figures of each model (Totals.summary)."""
        with self._lock:
            return {
                model: {"engines": list(self._twins[model].names)} | totals.summary()
                for model, totals in self._totals.items()
            }

    def observe(self, request: Observed) -> None:
        """The next request. KeyError for a model whose engines were not told. Mutates."""
        twins = self._twins[request.model]
        self._begin_s.setdefault(request.model, request.timestamp_ms / 1e3)
        if self._record is not None:
            self._record.write(msgspec.json.encode(request) + b"\n")
        for one in twins.tell(request):
            self._note(one)

    def finish(self) -> None:
        """Let all requests end, and close the files. Mutates."""
        for twins in self._twins.values():
            for one in twins.finish():
                self._note(one)
        for file in (self._record, self._compared, self._decisions):
            if file is not None:
                file.close()

    def _note(self, one: Compared) -> None:
        with self._lock:
            self._totals[one.request.model].add(one)
        if self._compared is not None:
            self._compared.write(msgspec.json.encode(line_of(one)) + b"\n")
        if self._on_compared is not None:
            self._on_compared(one)

    def _tell_decisions(self, model: str) -> Callable[[ev.Decided | ev.Noted | ev.Closed, float], None] | None:
        decisions = self._decisions
        if decisions is None:
            return None

        def tell(effect: ev.Decided | ev.Noted | ev.Closed, now: float) -> None:
            unix_s = self._begin_s[model] + now
            match effect:
                case ev.Decided(decision):
                    decisions.decided(decision, unix_s, 0.0)
                case ev.Noted(decision_id, note):
                    decisions.noted(decision_id, note, unix_s)
                case ev.Closed(decision_id, finished):
                    decisions.closed(decision_id, finished, unix_s)

        return tell


def line_of(one: Compared) -> dict[str, Any]:
    """A compared request as JSON, without its blocks. Times in s, `at` unix."""
    request = one.request
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
            for kind, record in (("as_recorded", one.as_recorded), ("would_be", one.would_be))
        },
    }


def _appending(path: Path | None) -> IO[bytes] | None:
    if path is None:
        return None
    with suppress(FileExistsError):
        path.parent.mkdir(parents=True)
    return path.open("ab", buffering=0)

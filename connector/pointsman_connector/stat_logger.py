"""Stat logger that shows agents on the engine's /metrics what the engine is: its limits, KV transfer support, tokenizer and
identity.
It also lets the API server continue answers (answer_continuation.py).

vLLM loads `MetricsAnnouncer` through the entry-point group vllm.stat_logger_plugins, in the processes that serve /metrics. It
also counts the requests whose KV was checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.v1.metrics.loggers import StatLoggerBase

from pointsman_connector.announcement import announce
from pointsman_connector.answer_continuation import register
from pointsman_connector.engine_identity import announce_identity
from pointsman_connector.engine_info import announce_engine
from pointsman_connector.kv_check_metrics import count_check, counts_checks
from pointsman_connector.vllm_version import warn_if_untested, warn_without

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.metrics.stats import IterationStats, SchedulerStats


class MetricsAnnouncer(StatLoggerBase):
    """Announces one engine, and counts its checked requests. No error of this class reaches the engine: the engine is more
    important than what it says of itself."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0, *_: Any, **__: Any) -> None:
        self._warned = False
        self._engine = engine_index
        parts: tuple[tuple[str, Callable[[], None]], ...] = (
            ("the announcement of its limits and devices", partial(announce_engine, vllm_config)),
            ("the announcement of its KV transfer support and tokenizer", partial(announce, vllm_config)),
            ("the announcement of its identity", partial(announce_identity, vllm_config)),
            # Here and not in the general plug-in, which all processes load: only API servers have the modules already.
            ("continued answers", register),
        )
        for part, begin in parts:
            try:
                warn_if_untested()
                begin()
            except Exception as error:
                warn_without(part, error)

    def record(
        self,
        scheduler_stats: SchedulerStats | None = None,
        iteration_stats: IterationStats | None = None,
        *_: Any,
        **__: Any,
    ) -> None:
        """Count the statistics of one step. vLLM calls this for all of its stat loggers, in the handler of all outputs, where an
        error would end every request. Whatever raises one is not counted, and the first one is logged."""
        if scheduler_stats is None:
            return
        with self._errors_logged():
            for name, values in _checks(scheduler_stats.kv_connector_stats or {}):
                with self._errors_logged():
                    count_check(name, float(sum(values)), self._engine)

    @contextmanager
    def _errors_logged(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not self._warned:
                warn_without("the counts of checked KV", error)
            self._warned = True

    def log_engine_initialized(self) -> None:
        """Do nothing. vLLM requires the method."""


# Another vLLM may require further methods. Without them the class could not be instantiated, and the engine would not start.
MetricsAnnouncer.__abstractmethods__ = frozenset()


def _checks(stats: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Yield a connector's statistics of KV checks. A MultiConnector has a mapping of statistics for each of its connectors."""
    for name, values in stats.items():
        if counts_checks(name):
            yield name, values
        elif isinstance(values, Mapping):
            yield from _checks(values)

"""The logger counts a connector's statistics, and an error of its own never reaches the engine."""

from __future__ import annotations

import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY

from pointsman_connector import vllm_version
from tests.support.fake_modules import fake_modules

MODULES = ("pointsman_connector.stat_logger", "pointsman_connector.kv_check_metrics")


class StatLoggerBase(ABC):
    """As vLLM's, with a method that only another version has."""

    @abstractmethod
    def record(self, scheduler_stats: Any, iteration_stats: Any) -> None: ...

    @abstractmethod
    def only_in_another_version(self) -> None: ...


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, with stand-ins for what is not installed here."""
    logged: list[str] = []
    logger = SimpleNamespace(
        info=lambda *_: None,
        warning=lambda message, *values: logged.append(message % values),
        debug=lambda *_, **__: None,
    )
    contents: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": f"{vllm_version.TESTED}.0"},
        "vllm.logger": {"init_logger": lambda _: logger},
        "vllm.v1": {},
        "vllm.v1.metrics": {},
        "vllm.v1.metrics.loggers": {"StatLoggerBase": StatLoggerBase},
        "pointsman_connector.announcement": {"announce": lambda _: None},
        "pointsman_connector.engine_identity": {"announce_identity": lambda _: None},
        "pointsman_connector.engine_info": {"announce_engine": lambda _: None},
        "pointsman_connector.answer_continuation": {"register": lambda: None},
    }
    fake_modules(monkeypatch, contents)
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    module: Any = importlib.import_module(MODULES[0])
    module.logged = logged
    yield module
    metrics = sys.modules[MODULES[1]]
    REGISTRY.unregister(metrics._CHECKED)
    REGISTRY.unregister(metrics._LATE)
    REGISTRY.unregister(metrics._WRONG)
    for name in MODULES:
        del sys.modules[name]


def stats(connector: dict[str, Any] | None) -> Any:
    """What is read of SchedulerStats."""
    return SimpleNamespace(kv_connector_stats=connector)


def value(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(name, labels)


def test_checked_and_wrong_requests_are_on_the_metrics_page(module: Any) -> None:
    announcer = module.MetricsAnnouncer(object())
    announcer.record(stats({"num_checked_requests": [1, 1], "num_wrong_requests_from http://p:1 p1": [1]}), None)
    announcer.record(stats(None), None)
    announcer.record(stats({"MooncakeConnector": {"num_checked_requests": [1]}}), None)
    assert value("pointsman_kv_checked_requests_total") == 3
    assert value("pointsman_kv_wrong_requests_total", sender="http://p:1", engine_id="p1", engine="0") == 1
    assert module.logged == []


def test_wrong_requests_are_counted_by_sender_and_rank(module: Any) -> None:
    """A sender has another engine id after a restart, and each data-parallel rank refuses for itself."""
    for rank, engine_id in ((0, "p1"), (0, "p2"), (1, "p2")):
        key = f"num_wrong_requests_from http://p:1 {engine_id}"
        module.MetricsAnnouncer(object(), rank).record(stats({key: [1]}), None)
    name, sender = "pointsman_kv_wrong_requests_total", "http://p:1"
    assert value(name, sender=sender, engine_id="p1", engine="0") == 1
    assert value(name, sender=sender, engine_id="p2", engine="0") == 1
    assert value(name, sender=sender, engine_id="p2", engine="1") == 1
    assert value(name, sender=sender, engine_id="p1", engine="1") is None


def test_statistics_of_other_connectors_are_left_alone(module: Any) -> None:
    """vLLM's OffloadingConnector has mappings whose keys are tuples of labels, beside this connector under a MultiConnector."""
    delay = "vllm:kv_offload_lookup_sync_delay_seconds"
    offload = {"types": {delay: "histogram"}, "data": {delay: {(): [0.0001], ("cpu", "gpu"): 3}}, "names": ["a"]}
    announcer = module.MetricsAnnouncer(object())
    announcer.record(stats({"OffloadingConnector": offload, "MooncakeConnector": {"num_checked_requests": [1]}}), None)
    assert module.logged == []
    assert value("pointsman_kv_checked_requests_total") == 1


def test_an_error_is_logged_once_and_concerns_one_value(module: Any) -> None:
    announcer = module.MetricsAnnouncer(object())
    announcer.record(SimpleNamespace(), None)
    assert len(module.logged) == 1, "vLLM's statistics have another shape"
    assert "runs without the counts of checked KV: AttributeError" in module.logged[0]
    assert "\n" not in module.logged[0]
    announcer.record(stats({"num_late_requests": [None], "num_checked_requests": [1]}), None)
    announcer.record(stats({"num_checked_requests": [1]}), None)
    assert len(module.logged) == 1
    assert value("pointsman_kv_late_requests_total") == 0
    assert value("pointsman_kv_checked_requests_total") == 2


def test_an_engine_starts_even_if_it_cannot_announce(module: Any) -> None:
    def fails(_: object) -> None:
        raise AttributeError("no such field in this version")

    module.announce = module.announce_engine = module.announce_identity = fails
    announcer = module.MetricsAnnouncer(object())
    assert len(module.logged) == 3
    announcer.record(stats({"num_checked_requests": [1]}), None)
    assert value("pointsman_kv_checked_requests_total") == 1


def test_arguments_that_only_another_version_passes_are_accepted(module: Any) -> None:
    announcer = module.MetricsAnnouncer(object(), 1, client_count=4)
    announcer.record(scheduler_stats=stats({"num_checked_requests": [1]}), iteration_stats=None, ec_stats=object())
    assert value("pointsman_kv_checked_requests_total") == 1
    assert module.logged == []

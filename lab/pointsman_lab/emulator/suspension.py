"""The emulated engine's sleep, pause and cache reset: vLLM's endpoints of VLLM_SERVER_DEV_MODE=1, and its sleep metrics.

Sleep and pause abort the open requests (mode=abort) or keep them unanswered (mode=keep). The emulated engine does not have
mode=wait. New requests are accepted, and computed after wake_up or resume. As in vLLM the reset of the prefix cache is published
with the next step.
"""

from __future__ import annotations

from collections.abc import Iterator

from aiohttp import web
from prometheus_client.core import GaugeMetricFamily, Metric

from pointsman_lab.emulator.engine_loop import EngineLoop
from pointsman_lab.engine.model import EngineModel

_MODES = ("abort", "keep")
_LEVELS = {"weights_offloaded": 1, "discard_all": 2}


class Suspension:
    """Whether one engine sleeps (its level) or is paused, and how often it was put to sleep and woken up."""

    def __init__(self, model: EngineModel, loop: EngineLoop) -> None:
        self._model = model
        self._loop = loop
        self._level: int | None = None
        self._completed: dict[str, int] = {}

    def routes(self) -> list[web.RouteDef]:
        """Return the development endpoints."""
        return [
            web.post("/sleep", self._sleep),
            web.post("/wake_up", self._wake_up),
            web.get("/is_sleeping", self._is_sleeping),
            web.post("/pause", self._pause),
            web.post("/resume", self._resume),
            web.get("/is_paused", self._is_paused),
            web.post("/reset_prefix_cache", self._reset),
        ]

    def metrics(self, labels: dict[str, str]) -> Iterator[Metric]:
        """Yield the sleep state and, after the first operation, the counts of operations."""
        states = GaugeMetricFamily("vllm:engine_sleep_state", "sleep state", labels=[*labels, "sleep_state"])
        states.add_metric([*labels.values(), "awake"], float(self._level is None))
        for state, level in _LEVELS.items():
            states.add_metric([*labels.values(), state], float(self._level == level))
        yield states
        if self._completed:
            name = "vllm:sleep_mode_operation_duration_seconds"
            family = Metric(name, "durations of sleep operations", "histogram")
            for operation, count in self._completed.items():
                family.add_sample(f"{name}_count", {"operation": operation}, count)
            yield family

    def _suspend(self, request: web.Request, *, clear: bool) -> None:
        mode = request.query.get("mode", "abort")
        if mode not in _MODES:
            raise web.HTTPBadRequest(reason=f"the emulated engine has the modes {', '.join(_MODES)}")
        self._loop.suspend(abort=mode == "abort")
        if clear:
            # As in vLLM the host tier is cleared, too.
            self._model.reset_prefix_cache(offloaded=True)

    async def _sleep(self, request: web.Request) -> web.Response:
        level = int(request.query.get("level", "1"))
        self._suspend(request, clear=level >= 1)
        self._level = level
        self._count("sleep")
        return web.json_response({"status": "sleeping", "level": level})

    async def _wake_up(self, request: web.Request) -> web.Response:
        self._level = None
        self._loop.resume()
        self._count("wake")
        return web.json_response({"status": "awake", "tags": None})

    async def _is_sleeping(self, request: web.Request) -> web.Response:
        return web.json_response({"is_sleeping": self._loop.suspended})

    async def _pause(self, request: web.Request) -> web.Response:
        self._suspend(request, clear=request.query.get("clear_cache", "true").lower() == "true")
        return web.json_response({"status": "paused"})

    async def _resume(self, request: web.Request) -> web.Response:
        self._loop.resume()
        return web.json_response({"status": "resumed"})

    async def _is_paused(self, request: web.Request) -> web.Response:
        return web.json_response({"is_paused": self._loop.suspended})

    async def _reset(self, request: web.Request) -> web.Response:
        offloaded = request.query.get("reset_external", "false").lower() == "true"
        return web.json_response({"success": self._model.reset_prefix_cache(offloaded=offloaded)})

    def _count(self, operation: str) -> None:
        self._completed[operation] = self._completed.get(operation, 0) + 1

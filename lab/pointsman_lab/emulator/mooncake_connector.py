"""Prefill on one emulated instance, decode on another, as with vLLM's MooncakeConnector. transfer_id joins the two requests.

The request to the prefilling instance has {do_remote_decode, transfer_id}. The request to the decoding instance has
{do_remote_prefill, remote_engine_id, remote_bootstrap_addr, transfer_id}. The decoding instance takes blocks for the missing KV
and requests the transfer. It has the KV one transfer time after the prefill's end. With `layerwise`, the part that can be pushed
between the request and the prefill's end is saved. Only the waiting is emulated; no KV is sent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import aiohttp

from pointsman_lab.emulator.engine_loop import FetchKv
from pointsman_lab.emulator.openai_api import ApiError
from pointsman_lab.engine.cost_profile import Profile

# Maximum time that either side waits for the other, s; VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT in vLLM.
ABORT_S = 480.0


class KvTransfers:
    """Prefills of this instance for other instances, by transfer_id. `address` is where others reach this instance."""

    def __init__(self, engine_id: str, profile: Profile, speedup: float, *, layerwise: bool) -> None:
        self.engine_id = engine_id
        self.address = ""
        self._profile = profile
        self._speedup = speedup
        self._layerwise = layerwise
        # By transfer_id: the computing time of the prefill, s. Set when the prefill ends.
        self._prefills: dict[str, asyncio.Future[float]] = {}

    def bootstrap(self) -> dict[str, Any]:
        """Return the answer of a Mooncake bootstrap server to GET /query."""
        return {"0": {"engine_id": self.engine_id, "worker_addr": {"0": {"0": f"tcp://{self.address}"}}}}

    def prefilled(self, transfer_id: str, prefill_s: float) -> None:
        """Record the end of a prefill that took `prefill_s`. Its KV can be fetched for ABORT_S."""
        future = self._future(transfer_id)
        if not future.done():
            future.set_result(prefill_s)

    async def wait_for(self, transfer_id: str, engine_id: str) -> float:
        """Wait for a prefill; return for how many seconds of it the caller has waited. Raises ApiError 404 for another engine's
        id, and 504 if the prefill does not end in time."""
        if engine_id != self.engine_id:
            raise ApiError(404, f"engine {engine_id} is not at this address")
        asked_at = time.monotonic()
        try:
            async with asyncio.timeout(ABORT_S):
                prefill_s = await asyncio.shield(self._future(transfer_id))
        except TimeoutError as error:
            raise ApiError(504, "the prefill did not end in time") from error
        finally:
            self._prefills.pop(transfer_id, None)
        return min(time.monotonic() - asked_at, prefill_s)

    def fetcher(self, params: Mapping[str, Any]) -> FetchKv:
        """Return a function that fetches a prompt's KV from the instance that `params` name. Raises ApiError 500 if a parameter
        is missing; the function raises it if the transfer fails."""
        for key in ("transfer_id", "remote_engine_id", "remote_bootstrap_addr"):
            if not isinstance(params.get(key), str):
                # In vLLM a missing remote_engine_id stops the whole engine. This is not emulated.
                raise ApiError(500, f"KeyError: {key!r}")
        return partial(self._fetch, params)

    async def _fetch(self, params: Mapping[str, Any], tokens: int) -> None:
        url = f"{params['remote_bootstrap_addr']}/emulated_transfers/{params['transfer_id']}"
        timeout = aiohttp.ClientTimeout(total=ABORT_S + 60)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.get(url, params={"engine_id": params["remote_engine_id"]}) as response,
            ):
                if response.status != 200:
                    raise ApiError(500, f"KV transfer failed: the prefilling instance answered {response.status}")
                overlapped_s = float((await response.json())["overlapped_s"]) * self._speedup
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ApiError(500, f"KV transfer failed: {type(error).__name__}") from error
        tail_s = self._profile.transfer_tail_s(tokens, overlapped_s if self._layerwise else 0.0)
        await asyncio.sleep(tail_s / self._speedup)

    def _future(self, transfer_id: str) -> asyncio.Future[float]:
        future = self._prefills.get(transfer_id)
        if future is None:
            loop = asyncio.get_running_loop()
            future = self._prefills[transfer_id] = loop.create_future()
            loop.call_later(ABORT_S, self._prefills.pop, transfer_id, None)
        return future

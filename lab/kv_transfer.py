"""Prefill on one emulated instance, decode on another, as with vLLM's MooncakeConnector: transfer_id joins the two requests.

The prefilling side is asked with {do_remote_decode, transfer_id} and keeps what it computed; the decoding side with
{do_remote_prefill, remote_engine_id, remote_bootstrap_addr, transfer_id} waits for it and then for the transfer's time.
Only the waiting is emulated: the decoding side takes its blocks when the transfer is done, not when it begins.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import aiohttp

from lab.openai_surface import ApiError
from lab.profile import Profile

# VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT: how long either side waits for the other.
ABORT_S = 480.0


class Transfers:
    """What this instance has prefilled for others, by transfer_id. `address` is where others reach it."""

    def __init__(self, engine_id: str, profile: Profile, speedup: float) -> None:
        self.engine_id = engine_id
        self.address = ""
        self._profile = profile
        self._speedup = speedup
        self._tokens: dict[str, asyncio.Future[int]] = {}

    def bootstrap(self) -> dict[str, Any]:
        """What GET /query of a Mooncake bootstrap server answers."""
        return {"0": {"engine_id": self.engine_id, "worker_addr": {"0": {"0": f"tcp://{self.address}"}}}}

    def prefilled(self, transfer_id: str, tokens: int) -> None:
        """A prefill is done: its KV can be fetched, until nobody has for ABORT_S."""
        future = self._future(transfer_id)
        if not future.done():
            future.set_result(tokens)

    async def wait_for(self, transfer_id: str, engine_id: str) -> int:
        """Tokens of a prefill, once it is done. Raises ApiError 404 for another engine's id and 504 when it never comes."""
        if engine_id != self.engine_id:
            raise ApiError(404, f"engine {engine_id} is not here")
        try:
            return await asyncio.wait_for(asyncio.shield(self._future(transfer_id)), ABORT_S)
        except TimeoutError as error:
            raise ApiError(504, "the prefill never came") from error
        finally:
            self._tokens.pop(transfer_id, None)

    async def fetch(self, params: Mapping[str, Any], prompt_tokens: int) -> int:
        """Fetch a prompt's KV from the instance that `params` name; the tokens that came. Raises ApiError 500 as vLLM fails."""
        for key in ("transfer_id", "remote_engine_id", "remote_bootstrap_addr"):
            if not isinstance(params.get(key), str):
                # In vLLM a missing remote_engine_id takes the whole engine down; that lesson is not repeated here.
                raise ApiError(500, f"KeyError: {key!r}")
        url = f"{params['remote_bootstrap_addr']}/emulated_transfers/{params['transfer_id']}"
        timeout = aiohttp.ClientTimeout(total=ABORT_S + 60)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.get(url, params={"engine_id": params["remote_engine_id"]}) as response,
            ):
                if response.status != 200:
                    raise ApiError(500, f"KV transfer failed: the prefilling instance answered {response.status}")
                available = int((await response.json())["tokens"])
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ApiError(500, f"KV transfer failed: {type(error).__name__}") from error
        tokens = min(available, prompt_tokens)
        await asyncio.sleep(self._profile.transfer_time_s(tokens) / self._speedup)
        return tokens

    def _future(self, transfer_id: str) -> asyncio.Future[int]:
        future = self._tokens.get(transfer_id)
        if future is None:
            loop = asyncio.get_running_loop()
            future = self._tokens[transfer_id] = loop.create_future()
            loop.call_later(ABORT_S, self._tokens.pop, transfer_id, None)
        return future

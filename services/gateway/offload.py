"""Prefills on one instance for another, over HTTP: the request to P, the bootstrap server's answer, the pull on D."""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from services.gateway import kv_transfer as kv
from services.gateway.dialects import Call
from services.gateway.moves import StepGiven, Target
from services.gateway.upstream import Upstream, UpstreamError

BOOTSTRAP_WITHIN_S = 3.0
REMEMBERED = 1_024


class Bootstraps:
    """Engine ids by instance and incarnation, asked for once: an engine has a new one after every start."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._known: OrderedDict[tuple[str, str, str], str] = OrderedDict()

    async def engine_id(self, target: Target) -> str:
        """The engine id of `target`. Raises TransferError."""
        key = _key(target)
        if (known := self._known.get(key)) is not None:
            return known
        try:
            async with asyncio.timeout(BOOTSTRAP_WITHIN_S):
                answer = await self._upstream.get(target.bootstrap, "/query")
        except TimeoutError:
            raise kv.TransferError("the bootstrap server is slow") from None
        except UpstreamError as error:
            raise kv.TransferError(f"the bootstrap server: {error.text}") from error
        found = self._known[key] = kv.engine_id_of(answer, target.rank)
        while len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        return found

    def forget(self, target: Target) -> None:
        """Ask again next time: a transfer with what is known of `target` failed."""
        self._known.pop(_key(target), None)


class Offload:
    """One request's transfers. What `prefill` leaves behind is what `pull` and `payload` send to D."""

    def __init__(self, upstream: Upstream, bootstraps: Bootstraps, call: Call, headers: Mapping[str, str]) -> None:
        self._upstream = upstream
        self._bootstraps = bootstraps
        self._call = call
        # P's request is another one than D's, in the engines' logs as well.
        self._headers = {**headers, "X-Request-ID": f"{headers.get('X-Request-ID', '')}-kv"}
        self._transfer: kv.Transfer | None = None
        self._source: Target | None = None

    async def prefill(self, step: StepGiven) -> None:
        """Have the step's instance compute the prompt's KV and keep it for the step's `kv_target`. Raises TransferError."""
        source, call = step.target, self._call
        assert step.kv_target is not None, "a prefill for another instance"
        self._transfer, self._source = None, source
        if source.kv_protocol not in (kv.MOONCAKE, kv.NIXL) or source.kv_protocol != step.kv_target.kv_protocol:
            raise kv.TransferError("the instances have no way to pass KV on")
        if reason := kv.why_not(call):
            raise kv.TransferError(reason)
        engine_id = await self._bootstraps.engine_id(source) if source.kv_protocol == kv.MOONCAKE else ""
        transfer_id = secrets.token_hex(16)
        answer = await self._post(source, kv.send_params(source.kv_protocol, transfer_id))
        self._transfer = kv.fetch_params(source.kv_protocol, transfer_id, engine_id, source.bootstrap, answer)

    async def pull(self, step: StepGiven) -> None:
        """Bring the KV into the step's instance. Raises TransferError."""
        await self._post(step.target, self._wanted(step).params)

    def payload(self, step: StepGiven, payload: bytes) -> bytes:
        """The client's request, with the way to the KV when the step has a source. Raises TransferError."""
        return payload if step.kv_source is None else kv.with_params(payload, self._wanted(step))

    def failed(self) -> None:
        """A step of the transfer failed: what is known of P may be of an earlier start."""
        if self._source is not None:
            self._bootstraps.forget(self._source)

    def _wanted(self, step: StepGiven) -> kv.Transfer:
        of_another = step.kv_source is None or self._source is None or step.kv_source.url != self._source.url
        if self._transfer is None or of_another:
            raise kv.TransferError("nothing was prefilled there")
        return self._transfer

    async def _post(self, target: Target, params: Mapping[str, Any]) -> bytes:
        path, body = kv.prefill_request(self._call, params)
        try:
            return await self._upstream.whole(target, path, body, self._headers)
        except UpstreamError as error:
            raise kv.TransferError(error.text, instance_failed=not 400 <= error.status < 500) from error


def _key(target: Target) -> tuple[str, str, str]:
    return target.instance_id, target.incarnation, target.bootstrap

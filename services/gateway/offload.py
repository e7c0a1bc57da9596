"""Prefills on one instance for another, over HTTP: the request to P, the bootstrap server's answer, the pull on D."""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True)
class _Agreed:
    """What both requests of a Mooncake transfer say, whichever is sent first."""

    attempt_id: str
    source: Target
    transfer_id: str
    engine_id: str


class Offload:
    """One request's transfers: what `prefill` leaves behind, or agrees on, is what `pull` and `payload` send to D."""

    def __init__(
        self,
        upstream: Upstream,
        bootstraps: Bootstraps,
        call: Call,
        headers_of: Callable[[StepGiven], Mapping[str, str]],
    ) -> None:
        self._upstream = upstream
        self._bootstraps = bootstraps
        self._call = call
        self._headers_of = headers_of
        self._agreeing = asyncio.Lock()
        self._agreed: _Agreed | None = None
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
        if source.kv_protocol == kv.NIXL:
            self._transfer = kv.nixl_fetch(await self._post(step, kv.nixl_send()))
            return
        agreed = await self._agree(source, step.attempt_id)
        kv.check_prefilled(await self._post(step, kv.mooncake_send(agreed.transfer_id)))
        self._transfer = _fetch(agreed)

    async def pull(self, step: StepGiven, *, ahead: bool) -> None:
        """Bring the KV into the step's instance; `ahead`: while it is being computed. Raises TransferError."""
        await self._post(step, (await self._wanted(step, ahead)).params)

    async def payload(self, step: StepGiven, payload: bytes, *, ahead: bool) -> bytes:
        """The client's request, with the way to the KV when the step has a source. Raises TransferError."""
        return payload if step.kv_source is None else kv.with_params(payload, await self._wanted(step, ahead))

    def failed(self) -> None:
        """A step of the transfer failed: what is known of P may be of an earlier start."""
        if self._source is not None:
            self._bootstraps.forget(self._source)

    async def _agree(self, source: Target, attempt_id: str) -> _Agreed:
        """What the two requests of one transfer have in common, whichever of them asks first. Raises TransferError."""
        async with self._agreeing:
            if self._agreed is None or (self._agreed.attempt_id, self._agreed.source) != (attempt_id, source):
                engine_id = await self._bootstraps.engine_id(source)
                self._agreed = _Agreed(attempt_id, source, secrets.token_hex(16), engine_id)
            return self._agreed

    async def _wanted(self, step: StepGiven, ahead: bool) -> kv.Transfer:
        if ahead and step.kv_source is not None:
            return _fetch(await self._agree(step.kv_source, step.attempt_id))
        of_another = step.kv_source is None or self._source is None or step.kv_source.url != self._source.url
        if self._transfer is None or of_another:
            raise kv.TransferError("nothing was prefilled there")
        return self._transfer

    async def _post(self, step: StepGiven, params: Mapping[str, Any]) -> bytes:
        path, body = kv.prefill_request(self._call, params)
        headers = self._headers_of(step)
        # It is another request than the client's, in the engines' logs as well.
        headers = {**headers, "X-Request-ID": f"{headers.get('X-Request-ID', '')}-kv"}
        try:
            return await self._upstream.whole(step.target, path, body, headers)
        except UpstreamError as error:
            raise kv.TransferError(error.text, instance_failed=not 400 <= error.status < 500) from error


def _fetch(agreed: _Agreed) -> kv.Transfer:
    return kv.mooncake_fetch(agreed.transfer_id, agreed.engine_id, agreed.source.bootstrap)


def _key(target: Target) -> tuple[str, str, str]:
    return target.instance_id, target.incarnation, target.bootstrap

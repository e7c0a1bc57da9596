"""Prefills on one instance for another, over HTTP: the request to P, the bootstrap server's answer, the pull on D."""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pointsman.gateway.core.api import ApiCall
from pointsman.gateway.core.request import transfer_params as kv
from pointsman.gateway.core.request.request_events import StepAssigned, Target
from pointsman.gateway.io.engines.engine_client import Upstream, UpstreamError

BOOTSTRAP_WITHIN_S = 3.0
REMEMBERED = 1_024
RELEASE_WITHIN_S = 5.0
RELEASE_TRIES = 3


class EngineIdCache:
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
                answer = await self._upstream.get(target.bootstrap_url, "/query")
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


class KvReleases:
    """Frees KV that an engine keeps for a transfer that will not be, instead of waiting until it expires there."""

    def __init__(self, upstream: Upstream, count: Callable[[str], None]) -> None:
        """`count` is told what became of each: released, or failed."""
        self._upstream = upstream
        self._count = count
        self._running: set[asyncio.Task[None]] = set()

    def begin(self, transfer: kv.KvTransferParams, askable: Sequence[Target]) -> None:
        """Ask the first of `askable` that answers; returns at once."""
        task = asyncio.create_task(self._release(transfer, askable))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def close(self) -> None:
        """Give up what has not ended."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _release(self, transfer: kv.KvTransferParams, askable: Sequence[Target]) -> None:
        path, body = kv.release_request(transfer)
        for target in askable:
            try:
                async with asyncio.timeout(RELEASE_WITHIN_S):
                    answer = await self._upstream.post(target, path, body, {"Content-Type": "application/json"})
                    answer.close()
            except (TimeoutError, UpstreamError):
                continue
            if 400 <= answer.status < 500:
                self._count("released")
                return
        self._count("failed")


@dataclass(frozen=True)
class _Agreed:
    """What both requests of a Mooncake transfer say, whichever is sent first."""

    attempt_id: str
    source: Target
    transfer_id: str
    engine_id: str


class RemotePrefill:
    """One request's transfers: what `prefill` leaves behind, or agrees on, is what `pull` and `payload` send to D.

    P keeps what it computed until D has fetched it. From the moment that D has the request it sees to that itself, however the
    request ends; only what certainly did not come so far is let go by `over`: for a transfer that P knows nothing of any more
    Mooncake waits, and keeps one of its senders busy with it.
    """

    def __init__(
        self,
        upstream: Upstream,
        bootstraps: EngineIdCache,
        releases: KvReleases,
        call: ApiCall,
        obstacle: str,
        headers_of: Callable[[StepAssigned], Mapping[str, str]],
        pool: Callable[[], Sequence[Target]],
    ) -> None:
        """`obstacle`: why the call's prompt must not be prefilled elsewhere; empty where it may. `headers_of` tells what a step's
        requests carry, `pool` the instances of the model."""
        self._upstream = upstream
        self._bootstraps = bootstraps
        self._releases = releases
        self._pool = pool
        self._call = call
        self._obstacle = obstacle
        self._headers_of = headers_of
        self._agreeing = asyncio.Lock()
        self._agreed: _Agreed | None = None
        self._transfer: kv.KvTransferParams | None = None
        self._source: Target | None = None
        self._planned: tuple[Target, ...] = ()
        self._fetcher: Target | None = None  # who has, or may have, the request that fetches the KV

    async def prefill(self, step: StepAssigned) -> None:
        """Have the step's instance compute the prompt's KV and keep it for the step's `kv_target`. Raises TransferError."""
        source = step.target
        assert step.kv_target is not None, "a prefill for another instance"
        self.attempt_ended()
        self._source, self._planned = source, (step.kv_target,)
        if source.kv_protocol not in (kv.MOONCAKE, kv.NIXL) or source.kv_protocol != step.kv_target.kv_protocol:
            raise kv.TransferError("the instances have no way to pass KV on")
        self._check_allowed()
        if source.kv_protocol == kv.NIXL:
            self._transfer = kv.nixl_fetch(await self._post(step, kv.nixl_send()))
            return
        agreed = await self._agree(source, step.attempt_id)
        kv.check_prefilled(await self._post(step, kv.mooncake_send(agreed.transfer_id)))
        self._transfer = _fetch(agreed)

    async def pull(self, step: StepAssigned, *, early: bool) -> None:
        """Bring the KV into the step's instance; `early`: while it is being computed. Raises TransferError."""
        transfer = await self._wanted(step, early)
        with self.fetching(step):
            await self._post(step, transfer.params)

    async def payload(self, step: StepAssigned, payload: bytes, *, early: bool) -> bytes:
        """The client's request, with the way to the KV when the step has a source. Raises TransferError."""
        return payload if step.kv_source is None else kv.with_params(payload, await self._wanted(step, early))

    @contextmanager
    def fetching(self, step: StepAssigned) -> Iterator[None]:
        """The step's instance is sent the request that fetches the KV inside the block, and is known to fetch nothing where that
        raises an UpstreamError or TransferError that says so."""
        if step.kv_source is None:
            yield
            return
        self._fetcher = step.target
        try:
            yield
        except (UpstreamError, kv.TransferError) as error:
            cause = error if isinstance(error, UpstreamError) else error.__cause__
            if isinstance(cause, UpstreamError) and (cause.status >= 500 or not cause.sent):
                self._fetcher = None
            raise

    def failed(self) -> None:
        """A step of the transfer failed: what is known of P may be of an earlier start. Nobody will fetch what it keeps."""
        if self._source is not None:
            self._bootstraps.forget(self._source)
        self.attempt_ended()

    def attempt_ended(self) -> None:
        """No further step of this attempt follows."""
        transfer, source = self._transfer, self._source
        if transfer is not None and source is not None and self._fetcher is None:
            # P itself is there most likely, but with NIXL it cannot be its own peer.
            first = [source] if source.kv_protocol == kv.MOONCAKE else []
            others = [one for one in (*self._planned, *self._pool()) if one.url != source.url]
            able = {
                one.url: one
                for one in (*first, *others)
                if one.can_consume_kv and one.kv_protocol == source.kv_protocol
            }
            self._releases.begin(transfer, list(able.values())[:RELEASE_TRIES])
        self._transfer = self._source = self._fetcher = None

    async def _agree(self, source: Target, attempt_id: str) -> _Agreed:
        """What the two requests of one transfer have in common, whichever of them asks first. Raises TransferError."""
        async with self._agreeing:
            if self._agreed is None or (self._agreed.attempt_id, self._agreed.source) != (attempt_id, source):
                engine_id = await self._bootstraps.engine_id(source)
                self._agreed = _Agreed(attempt_id, source, secrets.token_hex(16), engine_id)
            return self._agreed

    def _check_allowed(self) -> None:
        if self._obstacle:
            raise kv.TransferError(self._obstacle)

    async def _wanted(self, step: StepAssigned, early: bool) -> kv.KvTransferParams:
        self._check_allowed()
        if early and step.kv_source is not None:
            return _fetch(await self._agree(step.kv_source, step.attempt_id))
        of_another = step.kv_source is None or self._source is None or step.kv_source.url != self._source.url
        if self._transfer is None or of_another:
            raise kv.TransferError("nothing was prefilled there")
        return self._transfer

    async def _post(self, step: StepAssigned, params: Mapping[str, Any]) -> bytes:
        path, body = kv.prefill_request(self._call, params)
        headers = self._headers_of(step)
        # It is another request than the client's, in the engines' logs as well.
        headers = {**headers, "X-Request-ID": f"{headers.get('X-Request-ID', '')}-kv"}
        try:
            return await self._upstream.post_for_body(step.target, path, body, headers)
        except UpstreamError as error:
            raise kv.TransferError(error.text, instance_failed=error.instance_failed, refused=error.refused) from error


def _fetch(agreed: _Agreed) -> kv.KvTransferParams:
    return kv.mooncake_fetch(agreed.transfer_id, agreed.engine_id, agreed.source.bootstrap_url)


def _key(target: Target) -> tuple[str, str, str]:
    return target.instance_id, target.incarnation, target.bootstrap_url

"""KV transfers over HTTP: the request to P, the query of its bootstrap server, and the pull on D."""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from pointsman_common.core.kv_transfer_params import mooncake_fetch, mooncake_send, nixl_send
from pointsman_gateway.core.api import with_fields
from pointsman_gateway.core.http_message import JSON_FIELDS
from pointsman_gateway.core.request import transfer_params as kv
from pointsman_gateway.core.request.placement_messages import target_of
from pointsman_gateway.core.request.request_context import RequestContext
from pointsman_gateway.core.request.request_events import StepAssigned, Target
from pointsman_gateway.io.engines.engine_client import Upstream, UpstreamError

# Timeout of a bootstrap server's answer, s.
BOOTSTRAP_WITHIN_S = 3.0
# Maximum number of engine ids in the cache.
REMEMBERED = 1_024
# Timeout of a release request, s.
RELEASE_WITHIN_S = 5.0
# Maximum number of instances to which a release request is sent.
RELEASE_TRIES = 3


class EngineIdCache:
    """A cache of engine ids by instance and incarnation. An engine has a new id after every start."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._known: OrderedDict[tuple[str, str, str], str] = OrderedDict()

    async def engine_id(self, target: Target) -> str:
        """Return the engine id of `target`, from the cache or its bootstrap server. Raises TransferError."""
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
        """Remove the engine id of `target`, because a transfer with it failed. The next call of engine_id() queries it again."""
        self._known.pop(_key(target), None)


class KvReleases:
    """Sends KV releases, so that an engine does not keep KV of a transfer that will not happen until it expires."""

    def __init__(self, upstream: Upstream, count: Callable[[str], None]) -> None:
        """`count` is called with the outcome of each release: "released" or "failed"."""
        self._upstream = upstream
        self._count = count
        self._running: set[asyncio.Task[None]] = set()

    def begin(self, transfer: kv.Params, askable: Sequence[Target]) -> None:
        """Start a release through the first instance of `askable` that answers; return at once."""
        task = asyncio.create_task(self._release(transfer, askable))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def close(self) -> None:
        """Cancel the releases that have not ended."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _release(self, transfer: kv.Params, askable: Sequence[Target]) -> None:
        path, body = kv.release_request(transfer)
        for target in askable:
            try:
                async with asyncio.timeout(RELEASE_WITHIN_S):
                    answer = await self._upstream.send(target, "POST", path, body, JSON_FIELDS)
                    answer.close()
            except (TimeoutError, UpstreamError):
                continue
            if 400 <= answer.status < 500:
                self._count("released")
                return
        self._count("failed")


# Transfer parameters -> path and body of one of a transfer's two requests.
_Request = Callable[[kv.Params], tuple[str, bytes]]


@dataclass(frozen=True)
class _Agreed:
    """The parameters that both requests of a Mooncake transfer share, whichever is sent first."""

    attempt_id: str
    source: Target
    transfer_id: str
    engine_id: str


class RemotePrefill:
    """The KV transfers of one request, one after the other. `pull` and `payload` send D the transfer parameters that `prefill`
    has returned or agreed; `fetch` does both, for a prefix that P has cached.

    P keeps the KV until D has fetched it. Once D has the request, D itself ensures that P's KV is freed, however the request
    ends. `transfer_ended` therefore releases KV only if D certainly did not receive the request. If P no longer has the transfer,
    Mooncake waits for it at a release and keeps one of its senders busy.
    """

    def __init__(
        self, upstream: Upstream, engine_ids: EngineIdCache, releases: KvReleases, context: RequestContext
    ) -> None:
        self._upstream = upstream
        self._engine_ids = engine_ids
        self._releases = releases
        self._context = context
        self._agreeing = asyncio.Lock()
        self._agreed: _Agreed | None = None
        self._transfer: kv.Params | None = None
        self._source: Target | None = None
        self._planned: tuple[Target, ...] = ()
        self._fetcher: Target | None = None  # the instance that has, or may have, the request that fetches the KV

    async def prefill(self, step: StepAssigned) -> bytes:
        """Make the step's instance compute the prompt's KV and keep it for the step's `kv_target`; return its answer. Raises
        TransferError and UpstreamError."""
        self._check_allowed()
        return await self._send(step, self._whole)

    async def pull(self, step: StepAssigned, *, early: bool) -> None:
        """Make the step's instance fetch the KV; `early`: while P still computes it. Raises TransferError and
        UpstreamError."""
        self._check_allowed()
        await self._receive(step, self._whole, early)

    async def payload(self, step: StepAssigned, payload: bytes, *, early: bool) -> bytes:
        """Return the client's request, with transfer parameters if the step has a KV source. Raises TransferError."""
        if step.kv_source is None:
            return payload
        self._check_allowed()
        return with_fields(payload, {"kv_transfer_params": await self._wanted(step, early)})

    async def fetch(self, step: StepAssigned, prefix: Sequence[int]) -> tuple[bytes, bytes]:
        """Make the step's instance fetch the KV of the prompt's first tokens, whose ids are `prefix`, from the step's source,
        which has them cached; return the answers of source and instance.

        What obstructs a transfer of the whole prompt does not matter: neither instance renders it, and the KV is cached under the
        tokens that both are sent. Raises TransferError and UpstreamError.
        """
        assert step.kv_source is not None, "a prefix of another instance"
        send = replace(step, target=step.kv_source, kv_source=None, kv_target=step.target)
        request = partial(kv.prefix_request, self._context.call, prefix)
        if step.beside is None:
            return await self._send(send, request), await self._receive(step, request, early=False)
        try:
            async with asyncio.TaskGroup() as both:
                sent = both.create_task(self._send(send, request))
                received = both.create_task(self._receive(step, request, early=True))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None  # that of the request which failed first, and ended the other
        return sent.result(), received.result()

    @contextmanager
    def fetching(self, step: StepAssigned) -> Iterator[None]:
        """Record that the step's instance receives the request that fetches the KV inside the block.

        The record is removed if the block raises an UpstreamError by which the instance certainly fetches nothing: a status of
        500 or more, or a request that was not sent.
        """
        if step.kv_source is None:
            yield
            return
        self._fetcher = step.target
        try:
            yield
        except UpstreamError as error:
            if error.status >= 500 or not error.sent:
                self._fetcher = None
            raise

    def failed(self) -> None:
        """Handle the failure of a transfer's step: drop P's engine id, which may be of an earlier start, and release P's KV."""
        if self._source is not None:
            self._engine_ids.forget(self._source)
        self.transfer_ended()

    def transfer_ended(self) -> None:
        """End the present transfer; release P's KV if no instance may have the request that fetches it."""
        transfer, source = self._transfer, self._source
        if transfer is not None and source is not None and self._fetcher is None:
            # P itself is the most likely to be reachable, but with NIXL it cannot be its own peer.
            first = [source] if source.kv_protocol == kv.MOONCAKE else []
            others = [
                target
                for target in (*self._planned, *map(target_of, self._context.state.pool.instances))
                if target.url != source.url
            ]
            able = {
                target.url: target
                for target in (*first, *others)
                if target.can_consume_kv and target.kv_protocol == source.kv_protocol
            }
            self._releases.begin(transfer, list(able.values())[:RELEASE_TRIES])
        self._transfer = self._source = self._fetcher = self._agreed = None

    async def _send(self, step: StepAssigned, request: _Request) -> bytes:
        """Make the step's instance keep the KV of the request's prompt for the step's `kv_target`; return its answer. Raises
        TransferError and UpstreamError."""
        source = step.target
        assert step.kv_target is not None, "KV for another instance"
        self.transfer_ended()
        self._source, self._planned = source, (step.kv_target,)
        if source.kv_protocol not in (kv.MOONCAKE, kv.NIXL) or source.kv_protocol != step.kv_target.kv_protocol:
            raise kv.TransferError("the instances have no common KV transfer protocol")
        if source.kv_protocol == kv.NIXL:
            answer = await self._post(step, request, nixl_send())
            self._transfer = kv.nixl_fetch(answer)
            return answer
        agreed = await self._agree(source, step.attempt_id)
        answer = await self._post(step, request, mooncake_send(agreed.transfer_id))
        kv.check_prefilled(answer)
        self._transfer = _fetch(agreed)
        return answer

    async def _receive(self, step: StepAssigned, request: _Request, early: bool) -> bytes:
        """Make the step's instance fetch the KV of the request's prompt; return its answer. Raises TransferError and
        UpstreamError."""
        transfer = await self._wanted(step, early)
        with self.fetching(step):
            return await self._post(step, request, transfer)

    def _whole(self, params: kv.Params) -> tuple[str, bytes]:
        context = self._context
        return kv.prefill_request(context.call, params, context.ids if context.exact_tokens else None)

    async def _agree(self, source: Target, attempt_id: str) -> _Agreed:
        """Return the parameters that the two requests of one transfer share, whichever calls first. Raises TransferError."""
        async with self._agreeing:
            if self._agreed is None or (self._agreed.attempt_id, self._agreed.source) != (attempt_id, source):
                engine_id = await self._engine_ids.engine_id(source)
                self._agreed = _Agreed(attempt_id, source, secrets.token_hex(16), engine_id)
            return self._agreed

    def _check_allowed(self) -> None:
        if self._context.transfer_obstacle:
            raise kv.TransferError(self._context.transfer_obstacle)

    async def _wanted(self, step: StepAssigned, early: bool) -> kv.Params:
        if early and step.kv_source is not None:
            return _fetch(await self._agree(step.kv_source, step.attempt_id))
        of_another = step.kv_source is None or self._source is None or step.kv_source.url != self._source.url
        if self._transfer is None or of_another:
            raise kv.TransferError("the KV source has prefilled nothing for this attempt")
        return self._transfer

    async def _post(self, step: StepAssigned, request: _Request, params: kv.Params) -> bytes:
        path, body = request(params) if self._context.call.light else await asyncio.to_thread(request, params)
        headers = self._context.headers_of(step)
        # The id differs from the client's request, so that the engines' logs show two requests.
        headers = {**headers, "X-Request-ID": f"{headers.get('X-Request-ID', '')}-kv"}
        return await self._upstream.post_for_body(step.target, path, body, headers)


def _fetch(agreed: _Agreed) -> kv.Params:
    return mooncake_fetch(agreed.transfer_id, agreed.engine_id, agreed.source.bootstrap_url)


def _key(target: Target) -> tuple[str, str, str]:
    return target.instance_id, target.incarnation, target.bootstrap_url

"""The gateway's client of all routers: it keeps a session to each and sends every request to the owner of its pool."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import structlog

from pointsman.agent.v1 import agent_pb2
from pointsman.router.v1 import fleet_pb2, fleet_pb2_grpc, placement_pb2
from pointsman_common.io.auth import CallMetadata
from pointsman_common.io.channel import open_channel
from pointsman_gateway.core.pool_owners import PoolOwners
from pointsman_gateway.core.pool_state import instances_without
from pointsman_gateway.core.request.local_pace import SILENT_S, LocalPace
from pointsman_gateway.core.request.local_placement import unfit
from pointsman_gateway.core.request.request_events import PLACEMENT_TIMEOUT, UNAVAILABLE
from pointsman_gateway.core.session_ends import SessionEnds
from pointsman_gateway.core.waiting_for_owner import Ask, PlaceAt, RefuseWaiting, WaitingForOwner, WaitingRequest
from pointsman_gateway.io.routing.router_stream import Dial, RouterSession

log = structlog.get_logger()

# Maximum time to send queued messages at the end, s.
FLUSH_TIMEOUT_S = 2.0
# Maximum delay of a report, s. It is sent together with others: a request's first token and end, or reports of several requests.
REPORT_DELAY_S = 0.005
# Interval of the reports of which instances send something, and of repeated ends of sessions, s.
REPORTS_S = 2.0
# Minimum interval between such a report and the next one, which the end of a request causes whose client has left, s.
TELL_HEARD_S = 0.25
# How long a begun answer has stood still when it is reported as stalled, and until when, s.
STALLED_S, STALL_TOLD_S = 10.0, 30.0

PlacementReply = placement_pb2.Placement | placement_pb2.Refusal


@dataclass(frozen=True, slots=True)
class WithoutRouter:
    """What becomes of a request that no router answers: it is served at `instance`, or refused (None) with `code` and `message`,
    as in PlacementRefused."""

    instance: placement_pb2.InstanceRef | None
    code: int = 0
    message: str = ""


# Message to a client whose model has no instance that may be chosen.
NO_INSTANCE = "No instance is ready for this model."


class NoRouter(Exception):
    """Raised if there is no router to ask, or it was lost before it answered."""


class OpenAnswer(NamedTuple):
    """What is asked of an answer that has begun."""

    generated: Callable[[], int]  # the attempt's tokens so far
    waits: Callable[[], bool]  # whether the engine's next bytes are waited for, and not for the client to read
    heard_at: Callable[[], float]  # when the last byte came, monotonic s; 0: not known


@dataclass(slots=True)
class _Request:
    """One request, from its first submission to its Finished.

    While `answer` is not done the request waits at `session` (None: it waits for an owner, in WaitingForOwner). `instance_id` is
    set when the request is placed; a router that connects later receives it in a hello. `timeout_s`: maximum wait for an answer,
    without the time for which the request is parked, until `parked_until` (monotonic s; None: it never was); `on_parked` is
    called with the maximum of that time, s. `computed_at`: the instance that has computed a part of the prompt, or empty.
    """

    request: placement_pb2.PlacementRequest  # as routers get it, but without block keys once it is placed
    deadline: float  # monotonic s until which its first step is waited for; 0: it was not asked for
    timeout_s: float = 0.0
    computed_at: str = ""
    parked_until: float | None = None
    on_parked: Callable[[float], None] | None = None
    session: RouterSession | None = None
    answer: asyncio.Future[PlacementReply | WithoutRouter] | None = None
    instance_id: str = ""
    cached_tokens: int = 0  # of the prompt, as predicted for the last placed step
    began: bool = False  # its first byte was reported
    asked_at: float | None = None  # monotonic s of its first submission; None: not submitted
    open_answer: OpenAnswer | None = None  # None: no answer has begun
    generated: int = 0  # the answer's tokens when progress() last saw them grow, or the gateway not wait
    progressed_at: float = 0.0  # when they were last seen to grow, or the gateway not to wait, monotonic s
    placed_at: float = 0.0  # monotonic s of the last placed step; 0: none
    move: Callable[[placement_pb2.Move], None] | None = None  # lets the request leave its instance; set once placed
    first_token_by: float | None = None  # monotonic s by which the client needs the first token; None: no limit

    def progress(self, now: float) -> tuple[bool, bool]:
        """Return whether the answer has progressed since the last call, and whether it has stood still for long. Mutates."""
        if self.open_answer is None:
            return False, False
        progressed = (count := self.open_answer.generated()) != self.generated
        if progressed or not self.open_answer.waits():
            self.generated, self.progressed_at = count, now
        return progressed, STALLED_S <= now - self.progressed_at < STALL_TOLD_S

    @property
    def sequences(self) -> int:
        """Number of sequences that its engine runs."""
        return max(self.request.sequences, 1)

    @property
    def asking(self) -> bool:
        """Whether the request waits for its first step."""
        return not self.instance_id and self.answer is not None and not self.answer.done()

    def open_stream(self) -> placement_pb2.OpenStream:
        """Return the message that announces a placed request."""
        return placement_pb2.OpenStream(
            request=self.request,
            instance_id=self.instance_id,
            phase=placement_pb2.PHASE_DECODE if self.began else placement_pb2.PHASE_PREFILL,
            cached_tokens=self.cached_tokens,
            generated_tokens=self.open_answer.generated() if self.open_answer is not None else 0,
        )


class RouterClient:
    """Sends requests and reports to routers. All calls must come from the event loop that start() ran on.

    `gateway_id` must be unique for this process: routers reserve it for the process that used it first. `url` is the gateway's
    own, for operators; empty: unknown.
    """

    def __init__(
        self,
        routers: Sequence[str],
        gateway_id: str,
        metadata: CallMetadata,
        grace_s: float,
        on_pools: Callable[[Sequence[placement_pb2.Pool]], None],
        on_connected: Callable[[bool], None],
        dial: Dial = open_channel,
        url: str = "",
    ) -> None:
        self._configured = list(dict.fromkeys(routers))
        self._gateway_id = gateway_id
        self._secret = secrets.token_bytes(16)
        self._metadata = metadata
        self._grace_s = grace_s
        self._on_pools = on_pools
        self._on_connected = on_connected
        self._open_channel = dial
        self._url = url
        self._owners = PoolOwners()
        self._session_ends = SessionEnds()
        self._sessions: dict[str, RouterSession] = {}
        self._requests: dict[str, _Request] = {}
        self._routes: dict[str, RouterSession] = {}  # cache: model -> the owner's session; cleared by each change
        self._announced_epochs: dict[str, tuple[str, int]] = {}  # pool -> router id and epoch of the last hello
        self._pace = LocalPace()
        self._waiting = WaitingForOwner(self._pace)
        self._asked: dict[str, tuple[str, int]] = {}  # pool -> router id and epoch of the owner that is asked
        self._wake: asyncio.Handle | None = None  # the timer for requests that wait for an owner
        self._reports: asyncio.Handle | None = None  # the timer of _report_often
        self._told_heard_at = -math.inf  # when what instances send was reported last, monotonic s
        self._wake_at = math.inf  # when it fires, in the loop's time, s
        self._sent_claims: dict[tuple[str, str], int] = {}  # router's address, pool -> the higher epoch that was sent
        self._closing = False
        self._ended: set[asyncio.Task[None]] = set()
        self.on_usage: Callable[[RouterSession, placement_pb2.UsageAnswer], None] = lambda session, answer: None
        self.on_routes: Callable[[], None] = lambda: None  # called after a session or a pool's owner changed

    @property
    def connected(self) -> bool:
        """Whether at least one session with a router is open."""
        return self._session_with() is not None

    def inflight(self) -> Mapping[str, int]:
        """Return the number of open requests by instance id, without zeros; each sequence of a request counts."""
        return self._pace.open

    @property
    def open_count(self) -> int:
        """Number of requests that are placed and not finished."""
        return sum(bool(entry.instance_id) for entry in self._requests.values())

    def usage_session(self) -> RouterSession | None:
        """Return the session with the router that accounts for API keys' limits; None if there is none.

        This router is the owner of the first pool by name that has an owner.
        """
        owner = self._owners.first_owner()
        session = self._session_with(owner.router_id) if owner is not None else None
        return session if session is not None and session.accounts_usage else None

    async def start(self) -> None:
        """Start to dial; return at once."""
        for address in self._configured:
            self._dial(address)
        self._reports = asyncio.get_running_loop().call_later(REPORTS_S, self._report_often)

    async def close(self) -> None:
        """Send the queued messages, and close the sessions when the routers have read them (or after FLUSH_TIMEOUT_S)."""
        self._closing = True
        for timer in (self._wake, self._reports):
            if timer is not None:
                timer.cancel()
        await asyncio.gather(*(session.close(FLUSH_TIMEOUT_S) for session in self._sessions.values()), *self._ended)

    async def first_step(
        self,
        request: placement_pb2.PlacementRequest,
        timeout_s: float,
        first_token_by: float | None = None,
        on_parked: Callable[[float], None] | None = None,
        computed_at: str = "",
    ) -> PlacementReply | WithoutRouter:
        """Submit `request` and return its first step or its refusal. If the router parks it, `on_parked` is called with the
        maximum time of that, s, and the wait is as much longer.

        If the router dies or loses the pool, the request is submitted to the new owner with its age and the remaining parts of
        `timeout_s` and of the time to `first_token_by` (monotonic s; None: no deadline). If the pool has no owner that answers,
        the request is placed without one, or refused (see WaitingForOwner), at `computed_at` if that instance is there.
        """
        answer = asyncio.get_running_loop().create_future()
        entry = _Request(
            request,
            time.monotonic() + timeout_s,
            timeout_s,
            computed_at,
            on_parked=on_parked,
            answer=answer,
            first_token_by=first_token_by,
        )
        self._requests[request.request_id] = entry
        self._submit(entry)
        return await self._answered(entry)

    async def next_step(
        self, request_id: str, index: int, error: str, instance_failed: bool, timeout_s: float
    ) -> PlacementReply:
        """Report the end of a PREFILL step (`error` empty: done) and return the next step or a refusal.

        The router receives `timeout_s`, the caller's maximum wait. Raises NoRouter if the router is lost: a router that
        reconnects, or a new owner, receives the open request but not its plan.
        """
        entry = self._requests[request_id]
        entry.session = self._route(entry.request.model)
        if entry.session is None:
            raise NoRouter
        entry.answer = asyncio.get_running_loop().create_future()
        done = placement_pb2.StepDone(request_id=request_id, step_index=index, ok=not error, error=error)
        done.instance_failed = instance_failed
        done.deadline.FromNanoseconds(int(timeout_s * 1e9))
        entry.session.send(placement_pb2.SessionRequest(step_done=done))
        reply = await self._answered(entry)
        assert not isinstance(reply, WithoutRouter)
        return reply

    def step_done(self, request_id: str, index: int) -> None:
        """Report that a PREFILL step is done whose next step has already been sent."""
        done = placement_pb2.StepDone(request_id=request_id, step_index=index, ok=True)
        self._report(self._requests[request_id], placement_pb2.SessionRequest(step_done=done))

    def placed(self, request: placement_pb2.PlacementRequest, instance_id: str, cached_tokens: int) -> None:
        """Store the instance of a request until finished(), and drop its block keys: the request is not submitted again."""
        entry = self._requests.get(request.request_id)
        if entry is None:
            entry = self._requests[request.request_id] = _Request(request, 0.0)
        entry.request.ClearField("keys")
        if entry.instance_id != instance_id:
            self._count_closed(entry)
            self._pace.opened(instance_id, entry.sequences)
            if entry.began:
                self._pace.began(instance_id, entry.sequences)
        entry.instance_id, entry.cached_tokens, entry.placed_at = instance_id, cached_tokens, time.monotonic()

    def served_alone(self, request_id: str) -> None:
        """Report that a request runs on the instance of the last placed(), without the step that its router would have sent."""
        entry = self._requests[request_id]
        self._report(entry, placement_pb2.SessionRequest(open_stream=entry.open_stream()))

    def first_token(self, request_id: str, refused_by: Sequence[str] = ()) -> None:
        """Report a request's first byte, and the instances that refused the request before."""
        entry = self._requests.get(request_id)
        if entry is None or not entry.instance_id:
            return
        if not entry.began:
            entry.began = True
            self._pace.began(entry.instance_id, entry.sequences)
        self._pace.answered(entry.instance_id)
        for refusing in refused_by:
            self._pace.failed(refusing, time.monotonic())
        first_token = placement_pb2.FirstToken(request_id=request_id, refused_by=refused_by)
        self._report(entry, placement_pb2.SessionRequest(first_token=first_token))

    def answer_begins(self, request_id: str, answer: OpenAnswer) -> None:
        """Set what is asked of a request's answer when the request is announced, and for reports of what engines send."""
        entry = self._requests[request_id]
        entry.open_answer, entry.progressed_at = answer, time.monotonic()

    def on_move(self, request_id: str, move: Callable[[placement_pb2.Move], None]) -> None:
        """Set the function that is called when a router asks for the request to leave its instance."""
        self._requests[request_id].move = move

    def finished(self, finished: placement_pb2.Finished) -> None:
        """Report an attempt's end. If no router is connected, the next hello reports the end by not listing the attempt."""
        cancelled, since_s = finished.outcome == placement_pb2.OUTCOME_CANCELLED, time.monotonic() - self._told_heard_at
        if cancelled and since_s >= TELL_HEARD_S:
            # Whether the engine had sent anything since the client asked says whether it is silent, or only slow.
            self._tell_heard()
        entry = self._requests.pop(finished.request_id, None)
        if entry is not None:
            self._waiting.remove(finished.request_id)
            self._count_closed(entry)
            self._judge(entry, finished)
            self._report(entry, placement_pb2.SessionRequest(finished=finished))

    def _judge(self, entry: _Request, finished: placement_pb2.Finished) -> None:
        """Note what an attempt's end says about its instance, for placements without a router."""
        now = time.monotonic()
        waited_s = now - entry.placed_at
        if finished.outcome == placement_pb2.OUTCOME_OK:
            self._pace.answered(entry.instance_id)
        elif (finished.outcome == placement_pb2.OUTCOME_FAILED and not finished.refused) or (
            entry.placed_at and not entry.began and waited_s >= SILENT_S and entry.request.streamed
        ):
            self._pace.failed(entry.instance_id, now)

    def _report_often(self) -> None:
        self._tell_heard()
        self._repeat_ends()
        self._reports = asyncio.get_running_loop().call_later(REPORTS_S, self._report_often)

    def _tell_heard(self) -> None:
        """Report to the owners of pools the instances whose answers have progressed since the last report, and the answers that
        stand still."""
        of_sessions: dict[RouterSession, tuple[dict[str, float], set[str]]] = {}
        self._told_heard_at = now = time.monotonic()
        for entry in self._requests.values():
            progressed, stalled = entry.progress(now)
            if (progressed or stalled) and (session := self._route(entry.request.model)) is not None:
                heard, stands = of_sessions.setdefault(session, ({}, set()))
                if progressed and entry.open_answer is not None:
                    heard_at = entry.open_answer.heard_at() or now
                    heard[entry.instance_id] = max(heard.get(entry.instance_id, 0.0), heard_at)
                else:
                    stands.add(entry.request.request_id)
        for session, (heard, stands) in of_sessions.items():
            message = placement_pb2.Heard(
                instance_ids=heard,
                ago_ms=[max(round((now - heard_at) * 1e3), 0) for heard_at in heard.values()],
                stalled=sorted(stands),
            )
            session.send(placement_pb2.SessionRequest(heard=message), REPORT_DELAY_S)

    def _repeat_ends(self) -> None:
        """Report the ends of sessions again that an owner has not confirmed. It was told before it had taken the pool, as another
        router had named it, or it had no store to keep the end in."""
        if not (overdue := self._session_ends.overdue(time.monotonic())):
            return
        pools_of: dict[str, set[str]] = {}
        for pool in self._owners.pools():
            pools_of.setdefault(pool.owner.router_id, set()).add(pool.model)
        for session in self._sessions.values():
            pools = pools_of.get(session.router_id, set())
            for (tenant, session_id), done in overdue if session.connected else ():
                if not done.issuperset(pools):
                    session.send(_end_of(tenant, session_id), REPORT_DELAY_S)

    def session_begins(self, request: placement_pb2.PlacementRequest) -> None:
        """Record that a client has sent a request, before its first submission: its session, if it has ended, begins anew."""
        self._session_ends.begun(request.tenant, request.session_id, self._owners.pool_of(request.model))

    def end_session(self, tenant: str, session_id: str) -> None:
        """Report the end of a session to the owners of all pools: now, or as soon as they are connected. They receive it after
        all earlier messages about the session's requests."""
        self._session_ends.add(tenant, session_id, time.monotonic())
        message = _end_of(tenant, session_id)
        owners = {router_id for router_id, _ in self._announced_epochs.values()}
        for session in self._sessions.values():
            if session.connected and session.router_id in owners:
                session.send(message, REPORT_DELAY_S)

    @property
    def unconfirmed_ends(self) -> int:
        """Number of ends of sessions that not all owners have confirmed."""
        return self._session_ends.unconfirmed([pool.model for pool in self._owners.pools()])

    @property
    def knows_fleet(self) -> bool:
        """Whether what routers tell now is certainly the whole fleet."""
        return self._owners.complete

    async def explain(self, request: placement_pb2.PlacementRequest, timeout_s: float) -> fleet_pb2.Decision:
        """Return the decision that a router would make on `request`, without a reservation. Raises NoRouter and
        grpc.aio.AioRpcError."""
        session = self._route(request.model) or self._session_with()
        if session is None or session.channel is None:
            raise NoRouter
        stub = fleet_pb2_grpc.FleetServiceStub(session.channel)  # type: ignore[arg-type]
        answer = await stub.Explain(
            fleet_pb2.ExplainRequest(request=request), timeout=timeout_s, metadata=self._metadata()
        )
        return answer.decision

    # Choice of the router.

    def _route(self, model: str, now_at: RouterSession | None = None) -> RouterSession | None:
        """Return the session with the owner of the model's pool; None if the owner is not connected.

        If no owner is known, return `now_at`, where an answer may be on its way, or any other session: its router answers with a
        refusal or places the request.
        """
        if (known := self._routes.get(model)) is not None:
            return known
        owner = self._owners.owner(self._owners.pool_of(model))
        if owner is None:
            return now_at if now_at is not None and now_at.connected else self._session_with()
        if (found := self._session_with(owner.router_id)) is not None:
            self._routes[model] = found
        return found

    def _session_with(self, router_id: str | None = None) -> RouterSession | None:
        """Return a connected session with the router, or with any; None if there is none."""
        connected = (session for session in self._sessions.values() if session.connected)
        return next((session for session in connected if router_id in (None, session.router_id)), None)

    def _report(self, entry: _Request, message: placement_pb2.SessionRequest) -> None:
        session = None
        if self._owners.owner(self._owners.pool_of(entry.request.model)) is not None:
            session = self._route(entry.request.model) or entry.session
        if session is not None:
            session.send(message, REPORT_DELAY_S)
            return
        # The router with the request is unknown, so all receive the report; the others ignore it. In a session that is being
        # opened, the report is queued behind the hello.
        for dialled in self._sessions.values():
            dialled.send(message, REPORT_DELAY_S)

    def _count_closed(self, entry: _Request) -> None:
        if entry.instance_id:
            self._pace.closed(entry.instance_id, entry.sequences, began=entry.began)

    def _submit(self, entry: _Request) -> None:
        """Submit a request to the owner for its first step; without an owner, or behind others, let it wait."""
        if not entry.asking:
            return
        now = time.monotonic()
        if entry.asked_at is None:
            entry.asked_at = now
        pool, session = self._owners.pool_of(entry.request.model), self._route(entry.request.model)
        if session is None:
            self._waiting.disconnected(pool, now, self._limit_s)
        if session is None or self._waiting.must_wait(pool):
            self._let_wait(entry, pool, now)
            self._wake_for(pool, now)
        else:
            self._ask(entry, session, now)

    def _resubmit(self, requests: Iterable[_Request]) -> None:
        """Take requests from their sessions, and let those that wait for their first step wait for the right one."""
        self._note_routes()
        now = time.monotonic()
        for entry in requests:
            self._detach(entry)
            if entry.asking:
                self._session_ends.asked_in_vain(entry.request.tenant, entry.request.session_id, now)
                self._let_wait(entry, self._owners.pool_of(entry.request.model), now)
        for pool in self._waiting.pools():
            self._wake_for(pool, now)

    def _ask(self, entry: _Request, session: RouterSession, now: float) -> None:
        """Send a request to the router that is to be asked."""
        entry.session = session
        assert entry.asked_at is not None
        left, deadline = max(entry.deadline - now, 1e-9), entry.request.deadline
        deadline.seconds, deadline.nanos = int(left), max(int(left % 1 * 1e9), 1)
        if entry.first_token_by is not None:
            entry.request.ttft_deadline.FromNanoseconds(int(max(entry.first_token_by - now, 0.0) * 1e9))
        if entry.parked_until is not None:
            # Its bound counts from the first submission. Its time in the queue of held requests has not begun.
            entry.request.ClearField("age")
            entry.request.parked.FromNanoseconds(int((now - entry.asked_at) * 1e9))
        elif now > entry.asked_at:
            entry.request.age.FromNanoseconds(int((now - entry.asked_at) * 1e9))
        session.send(placement_pb2.SessionRequest(place=entry.request))

    # Requests that wait for an owner.

    def _let_wait(self, entry: _Request, pool: str, now: float) -> None:
        assert entry.asked_at is not None
        # A request whose bound has passed was let in.
        parked_until = entry.parked_until if entry.parked_until is not None and entry.parked_until > now else None
        prompt = entry.request.request_id, entry.asked_at, entry.request.input_tokens, entry.request.exclude
        self._waiting.add(pool, WaitingRequest(*prompt, entry.computed_at, parked_until, entry.sequences))

    @property
    def _limit_s(self) -> float:
        """How long a pool may have no owner before its requests are placed without a router, s."""
        return self._owners.timeout_s if self.connected else self._grace_s

    def _note_routes(self) -> None:
        """Record whether there are routers to ask, after a session or the fleet changed."""
        now, pools = time.monotonic(), {pool.model for pool in self._owners.pools()}
        self._asked = {pool: asked for pool, asked in self._asked.items() if pool in pools}
        for pool in {*pools, *self._waiting.pools()}:
            session, owner = self._route(pool), self._owners.owner(pool)
            if session is None:
                self._waiting.disconnected(pool, now, self._limit_s)
            else:
                asked = session.router_id, owner.epoch if owner is not None else 0
                changed, self._asked[pool] = self._asked.get(pool) != asked, asked
                self._waiting.connected(pool, now, changed=changed)

    def _wake_for(self, pool: str, now: float) -> None:
        """Set the timer for what waits for the pool's owner."""
        at = self._waiting.wake_at(pool, now, self._limit_s)
        if at is None or self._closing:
            return
        loop = asyncio.get_running_loop()
        when = loop.time() + max(at - now, 0.0)
        if self._wake is not None:
            if self._wake_at <= when:
                return
            self._wake.cancel()
        self._wake, self._wake_at = loop.call_at(when, self._serve_waiting), when

    def _serve_waiting(self) -> None:
        """Ask, place or refuse the requests that are due."""
        self._wake, now = None, time.monotonic()
        for end in self._waiting.due(now, self._limit_s, self._answering, self._unfit):
            entry = self._requests.get(end.request_id)
            if entry is None or entry.answer is None or entry.answer.done():
                # It is cancelled, and its task has not run since.
                if isinstance(end, PlaceAt):
                    self._pace.closed(end.instance_id, end.sequences, began=False)
                continue
            match end:
                case Ask():
                    if (session := self._route(entry.request.model)) is not None:
                        self._ask(entry, session, now)
                    else:  # its model's name belongs to another pool by now
                        self._submit(entry)
                case PlaceAt():
                    instance = self._instance(self._owners.pool_of(entry.request.model), end.instance_id)
                    entry.request.ClearField("keys")
                    entry.instance_id, entry.placed_at = end.instance_id, now
                    entry.answer.set_result(WithoutRouter(instance))
                case RefuseWaiting():
                    why = "No router has let in the session in time." if end.parked else NO_INSTANCE
                    entry.answer.set_result(WithoutRouter(None, PLACEMENT_TIMEOUT if end.parked else UNAVAILABLE, why))
        for pool in self._waiting.pools():
            self._wake_for(pool, now)

    def _answering(self, model: str) -> list[str]:
        """Return the ids of the pool's instances that answer clients."""
        pool = self._owners.pool(model)
        instances = pool.instances if pool is not None else ()
        return [
            instance.instance_id for instance in instances if instance.kv_transfer.role != agent_pb2.KV_ROLE_PRODUCER
        ]

    def _unfit(self, request_id: str) -> list[str]:
        """Return the ids of the instances that a waiting request must not be placed on."""
        request = self._requests[request_id].request
        pool = self._owners.pool(self._owners.pool_of(request.model))
        return [*instances_without(pool, request.model), *unfit(request, pool.instances)] if pool is not None else []

    def _instance(self, model: str, instance_id: str) -> placement_pb2.InstanceRef:
        pool = self._owners.pool(model)
        assert pool is not None
        return pool.instances[bisect_left(pool.instances, instance_id, key=lambda instance: instance.instance_id)]

    async def _answered(self, entry: _Request) -> PlacementReply | WithoutRouter:
        assert entry.answer is not None
        try:
            step = await entry.answer
        finally:
            self._waiting.remove(entry.request.request_id)
        if not entry.instance_id:
            self._requests.pop(entry.request.request_id, None)
        return step

    # Callbacks of sessions.

    def _dial(self, address: str) -> None:
        session = RouterSession(
            address,
            self._metadata,
            self._hello,
            self._session_up,
            self._session_down,
            self._receive,
            lambda router_id: self._session_with(router_id) is not None,
            self._open_channel,
        )
        self._sessions[address] = session
        session.start()

    def _hello(self) -> placement_pb2.GatewayHello:
        requests = self._requests.values()
        return placement_pb2.GatewayHello(
            gateway_id=self._gateway_id,
            secret=self._secret,
            open_streams=[request.open_stream() for request in requests if request.instance_id],
            waiting_request_ids=[request.request.request_id for request in requests if request.asking],
            known_instance_ids=[instance.instance_id for pool in self._owners.pools() for instance in pool.instances],
            url=self._url,
        )

    def _session_up(self, session: RouterSession) -> None:
        self._routes.clear()
        if sum(session.connected for session in self._sessions.values()) == 1:
            self._on_connected(True)
        for pool, (router_id, _) in list(self._announced_epochs.items()):
            if router_id == session.router_id:
                # The new session's hello has announced all requests. Pools are added again when the router reports that it owns
                # them.
                del self._announced_epochs[pool]
        self._reroute()

    def _session_down(self, session: RouterSession) -> None:
        self._owners.forget(session.address)
        self._routes.clear()
        if not self.connected:
            self._on_connected(False)
        self._resubmit([request for request in self._requests.values() if request.session is session])
        if self.connected and not self._closing:
            self._fleet_changed()
        self.on_routes()

    def _detach(self, entry: _Request) -> None:
        """Detach a request from its session. A placed request that waits for its next step fails with NoRouter."""
        entry.session = None
        if entry.instance_id and entry.answer is not None and not entry.answer.done():
            entry.answer.set_exception(NoRouter())

    def _receive(self, session: RouterSession, message: placement_pb2.SessionResponse) -> None:
        match message.WhichOneof("kind"):
            case "placement":
                self._deliver(session, message.placement.request_id, message.placement)
            case "refusal":
                self._deliver(session, message.refusal.request_id, message.refusal)
            case "parked":
                self._wait_parked(session, message.parked)
            case "move":
                self._move(message.move)
            case "usage":
                self.on_usage(session, message.usage)
            case "session_ended":
                ended = message.session_ended
                self._session_ends.confirmed(ended.tenant, ended.session_id, ended.models)
            case "fleet":
                self._owners.begin(session.address, session.router_id, message.fleet)
                self._routes.clear()
                self._fleet_changed()
            case "fleet_update":
                self._owners.update(session.address, message.fleet_update)
                self._routes.clear()
                self._fleet_changed()

    def _deliver(self, session: RouterSession, request_id: str, step: PlacementReply) -> None:
        entry = self._requests.get(request_id)
        if entry is None or entry.session is not session:
            # The client has disconnected, or the request was submitted to another router: this router must release its
            # reservation. A later step needs no message, because the end of the request releases its reservations.
            if isinstance(step, placement_pb2.Placement) and step.step.index == 0:
                late = placement_pb2.Finished(request_id=request_id, outcome=placement_pb2.OUTCOME_CANCELLED)
                late.error = "the placement came too late"
                session.send(placement_pb2.SessionRequest(finished=late), REPORT_DELAY_S)
            return
        if entry.answer is None or entry.answer.done():
            return
        pool = self._owners.pool_of(entry.request.model)
        if isinstance(step, placement_pb2.Refusal) and step.not_serving:
            now = time.monotonic()
            if entry.asking and session is self._route(entry.request.model, session):
                self._waiting.refused(pool, now, self._limit_s)
            self._detach(entry)
            self._submit(entry)
            return
        if entry.asking:
            self._served(pool)
        if isinstance(step, placement_pb2.Placement):
            self.placed(entry.request, step.step.instance.instance_id, step.cached_tokens)
        entry.answer.set_result(step)

    def _served(self, pool: str) -> None:
        """Record that a router answers the pool's requests, and ask it those that wait."""
        if self._waiting.served(pool):
            self._wake_for(pool, time.monotonic())

    def _wait_parked(self, session: RouterSession, parked: placement_pb2.Parked) -> None:
        """Wait longer for the answer to a request that its router has parked."""
        entry = self._requests.get(parked.request_id)
        if entry is None or entry.session is not session or not entry.asking:
            return
        bound_s, now = parked.bound.seconds + parked.bound.nanos / 1e9, time.monotonic()
        entry.parked_until = now + bound_s
        entry.deadline = entry.parked_until + entry.timeout_s
        self._served(self._owners.pool_of(entry.request.model))
        if entry.on_parked is not None:
            entry.on_parked(bound_s)

    def _move(self, move: placement_pb2.Move) -> None:
        entry = self._requests.get(move.request_id)
        if entry is not None and entry.move is not None:
            entry.move(move)

    def _fleet_changed(self) -> None:
        """Apply a change of the fleet or of the owners of its pools: dial, announce, and route requests again."""
        pools = self._owners.pools()
        wanted = {*self._configured, *self._unreached(pools)}
        for address in wanted - self._sessions.keys():
            self._dial(address)
        for address in self._sessions.keys() - wanted - self._owners.addresses():
            if not self._sessions[address].connected:
                ended = asyncio.create_task(self._sessions.pop(address).close(0.0))
                self._ended.add(ended)
                ended.add_done_callback(self._ended.discard)
        claims = self._owners.outdated_claims()
        sent = {(address, model): owner.epoch for address, model, owner in claims}
        for address, model, owner in claims:
            if self._sent_claims.get((address, model)) != owner.epoch and (outdated := self._sessions.get(address)):
                claim = placement_pb2.OwnerClaim(model=model, owner=owner)
                outdated.send(placement_pb2.SessionRequest(owner_claim=claim))
        self._sent_claims = sent
        for session in self._sessions.values():
            # The owner of a new epoch starts from stored state, even if it is the previous owner, so all requests are announced.
            taken = {
                pool.model: (session.router_id, pool.owner.epoch)
                for pool in pools
                if session.connected
                and pool.HasField("owner")
                and pool.owner.router_id == session.router_id
                and self._announced_epochs.get(pool.model) != (session.router_id, pool.owner.epoch)
            }
            if taken:
                self._announced_epochs.update(taken)
                session.send(placement_pb2.SessionRequest(hello=self._hello()))
                for tenant, session_id in self._session_ends.untold(taken, time.monotonic()):
                    session.send(_end_of(tenant, session_id))
                for entry in self._requests.values():
                    # The end of a step that was reported before is lost: the router did not own the pool.
                    waits = entry.session is session and entry.answer is not None and not entry.answer.done()
                    if waits and entry.instance_id and self._owners.pool_of(entry.request.model) in taken:
                        self._detach(entry)
        self._reroute()
        self._on_pools(pools)
        self.on_routes()

    def _unreached(self, pools: Sequence[placement_pb2.Pool]) -> set[str]:
        """Return the addresses of owners without a connected session."""
        reached = {session.router_id for session in self._sessions.values() if session.connected}
        return {
            pool.owner.address
            for pool in pools
            if pool.HasField("owner") and pool.owner.router_id not in reached and pool.owner.address
        }

    def _reroute(self) -> None:
        """Submit each waiting request whose session is not the right one to the right router. One that waits for the owner of a
        pool that does not serve its model any more, or was not known to do so, waits for the right one."""
        misplaced = []
        for request in self._requests.values():
            if request.answer is None or request.answer.done():
                continue
            if request.session is None:
                waits_for = self._waiting.pool_of(request.request.request_id)
                if waits_for not in (None, self._owners.pool_of(request.request.model)):
                    self._waiting.remove(request.request.request_id)
                    misplaced.append(request)
                continue
            target = self._route(request.request.model, request.session)
            if target is not None and target is not request.session:
                misplaced.append(request)
        self._resubmit(misplaced)


def _end_of(tenant: str, session_id: str) -> placement_pb2.SessionRequest:
    return placement_pb2.SessionRequest(end_session=placement_pb2.EndSession(tenant=tenant, session_id=session_id))

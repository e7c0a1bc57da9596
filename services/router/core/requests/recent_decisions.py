"""What was decided on requests that are open or ended lately: an open one that comes again gets the same placement, and the id of
one that has ended is used up. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

from msgspec.structs import replace

from pointsman.router.core.types import NO_BACKLOG, Decision, FleetView

_NOTHING_SEEN = FleetView(())


# Ended requests that are still recognised when they are sent again.
MAX_ENDED = 20_000
# Decisions looked at in a step of forgetting a pool's: some microseconds, most of them for what they hold.
FORGET_AT_ONCE = 4


class RecentDecisions:
    """Decisions by request id; of ended requests at most MAX_ENDED, the oldest go first."""

    def __init__(self) -> None:
        self._by_request: OrderedDict[str, Decision] = OrderedDict()

    def __iter__(self) -> Iterator[Decision]:
        return iter(self._by_request.values())

    def get(self, request_id: str) -> Decision | None:
        """What was decided on a request."""
        return self._by_request.get(request_id)

    def put(self, decision: Decision) -> None:
        """Remember a decision, and of what it saw what its plan goes on with: all of it is in the log, and weighs 250 kB on 1,000
        instances. Mutates."""
        where = dict.fromkeys(step.instance_id for step in decision.result.steps)
        seen = tuple(
            replace(found, prefill_backlog=NO_BACKLOG)
            for one in where
            if (found := decision.view.find(one)) is not None
        )
        self._by_request[decision.request.request_id] = replace(
            decision,
            view=replace(decision.view, candidates=seen),
            result=replace(decision.result, scores={}, figures={}),
        )

    def drop(self, request_id: str) -> None:
        """A request that comes again is to be decided again. Mutates."""
        self._by_request.pop(request_id, None)

    def trim(self, request_id: str) -> None:
        """A request ended: its plan does not go on. Mutates."""
        if (decision := self._by_request.get(request_id)) is not None:
            self._by_request[request_id] = replace(decision, view=_NOTHING_SEEN)

    def evict(self, open_count: int, is_open: Callable[[str], bool]) -> None:
        """Forget the oldest of too many. Mutates."""
        while len(self._by_request) > MAX_ENDED + open_count:
            request_id, decision = self._by_request.popitem(last=False)
            if is_open(request_id):
                self._by_request[request_id] = decision

    def forget_pool(self, pool: str) -> Iterator[None]:
        """Forget a pool's, some at each step. Mutates."""
        for number, request_id in enumerate(list(self._by_request)):
            if (decision := self._by_request.get(request_id)) is not None and decision.pool == pool:
                del self._by_request[request_id]
            if number % FORGET_AT_ONCE == FORGET_AT_ONCE - 1:
                yield

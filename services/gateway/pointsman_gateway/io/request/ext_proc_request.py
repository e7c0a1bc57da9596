"""A request that a proxy carries: the proxy sends it to the instance that the gateway names, and the answer to the client."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pointsman_gateway.core.http_message import Request
from pointsman_gateway.core.request.request_events import Target
from pointsman_gateway.io.engines.engine_connection import UpstreamError, UpstreamResponse


class OtherInstanceAnswered(Exception):
    """Raised if another instance than the first of those that a proxy was given has answered."""

    def __init__(self, target: Target) -> None:
        super().__init__(target.instance_id)
        self.target = target


class InnocentFailure(UpstreamError):
    """Raised if a request fails without a fault of its instance: the proxy had no room for it, or has given it up."""


class Proxy(Protocol):
    """A proxy that carries one request. It can send the request once."""

    @property
    def restricts(self) -> bool:
        """Whether there are instances to which the proxy must not send the request."""

    async def excluded(self, targets: Sequence[Target]) -> list[str]:
        """Return the ids of those instances among `targets`."""

    async def post(
        self,
        targets: Sequence[Target],
        path: str,
        payload: bytes,
        fields: Mapping[str, str],
        every: Callable[[], Sequence[Target]],
    ) -> UpstreamResponse:
        """Have the request sent to the first of `targets`, or to the next ones if that does not answer; return the answer after
        its head. `every`: returns all instances of the pool, one of which the proxy may have chosen itself.

        If the request was sent before, only the first counts, and the answer is that of before. Raises UpstreamError, and
        OtherInstanceAnswered if the answer is another instance's than the first's.
        """

    def instance_lost(self) -> None:
        """Let the answer fail if it stays silent: the agent of its instance is gone."""


@dataclass(slots=True)
class ExtProcRequest(Request):
    """A request, and the proxy that carries it. Its writer writes to the proxy."""

    proxy: Proxy = field(kw_only=True)

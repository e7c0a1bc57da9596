"""What list methods share: pages, and building long responses in parts with pauses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any, TypeVar

from google.protobuf.message import Message

from pointsman_router.io.router import Router
from pointsman_router.io.rpc.errors import abort, field_status, page_token_status
from pointsman_router.io.rpc.pages import (
    DEFAULT_PAGE,
    MAX_PAGE_BYTES,
    InvalidPageToken,
    page_size,
    position_of,
    token_after,
)

# Longest time that building a response may block the event loop at once, s.
TURN_S = 0.001
# Pause after each such time, in which placements run, s. Each response takes at most a quarter of the event loop.
PAUSE_S = 0.003

T = TypeVar("T")
P = TypeVar("P")
M = TypeVar("M", bound=Message)


class PagedLists:
    """Base class of a service of one router with paginated list methods."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def _page(
        self, request: Any, kind: type[P], context: Any, default: int = DEFAULT_PAGE
    ) -> tuple[int, P | None]:
        """Return the maximum number of entries of the page, and the position after which it begins (None: at the list's begin).
        Aborts the call if either field is invalid."""
        try:
            return page_size(request.page_size, default), position_of(request, self._router.settings.router_id, kind)
        except InvalidPageToken as error:
            await abort(context, page_token_status(str(error)))
        except ValueError as error:
            await abort(context, field_status("page_size", str(error)))

    def _next_page(self, found: Sequence[T], size: int, position: Callable[[T], object], request: Any) -> str:
        """Return the token of the page that follows the first `size` entries of `found`; "" if `found` has no more than `size`.
        The caller must look for at least `size` + 1 entries."""
        return self._token(position(found[size - 1]), request) if len(found) > size else ""

    def _token(self, position: object, request: Any) -> str:
        return token_after(position, request, self._router.settings.router_id)


async def in_turns(items: Iterable[T]) -> AsyncIterator[T]:
    """Yield the items. Sleep for PAUSE_S whenever the loop over them has taken TURN_S."""
    until = time.perf_counter() + TURN_S
    for item in items:
        yield item
        if time.perf_counter() > until:
            await asyncio.sleep(PAUSE_S)
            until = time.perf_counter() + TURN_S


async def messages_of(found: Iterable[T], make: Callable[[T], M | None]) -> tuple[list[M], int]:
    """Return the messages that `make` makes of `found` (None: none), in turns, up to about MAX_PAGE_BYTES, and of how many they
    are."""
    messages: list[M] = []
    entries = page_bytes = 0
    async for one in in_turns(found):
        if page_bytes >= MAX_PAGE_BYTES:
            break
        entries += 1
        if (message := make(one)) is not None:
            messages.append(message)
            page_bytes += message.ByteSize()
    return messages, entries

"""What methods that tell long lists share: pages, and answers that are made in turns."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any, TypeVar

from pointsman.router.io.rpc.errors import abort, field_status, page_token_status
from pointsman.router.io.rpc.pages import DEFAULT_PAGE, InvalidPageToken, page_size, position_of, token_after
from pointsman.router.io.runtime import Router

# How long an answer may keep placements waiting, and how long they are alone then, in s: whoever asks how much, it takes at most
# a quarter of the loop.
TURN_S = 0.001
PAUSE_S = 0.003

T = TypeVar("T")
P = TypeVar("P")


class PagedLists:
    """A service of one router whose lists come in pages."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def _page(
        self, request: Any, kind: type[P], context: Any, default: int = DEFAULT_PAGE
    ) -> tuple[int, P | None]:
        """How many entries to tell, and after which position (None: from the beginning on)."""
        try:
            return page_size(request.page_size, default), position_of(request, self._router.settings.router_id, kind)
        except InvalidPageToken as error:
            await abort(context, page_token_status(str(error)))
        except ValueError as error:
            await abort(context, field_status("page_size", str(error)))

    def _next_page(self, found: Sequence[T], size: int, position: Callable[[T], object], request: Any) -> str:
        """The token of the page after the first `size` of `found`; empty when these are all: look for one more than is told."""
        return self._token(position(found[size - 1]), request) if len(found) > size else ""

    def _token(self, position: object, request: Any) -> str:
        return token_after(position, request, self._router.settings.router_id)


async def in_turns(items: Iterable[T]) -> AsyncIterator[T]:
    """The items, with PAUSE_S for the others whenever they have taken TURN_S."""
    until = time.perf_counter() + TURN_S
    for item in items:
        yield item
        if time.perf_counter() > until:
            await asyncio.sleep(PAUSE_S)
            until = time.perf_counter() + TURN_S

"""Paged list calls to a router, read to the last page."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

A = TypeVar("A")


def whole(ask: Callable[[Any], A], request: Any, entries: str, most: int | None = None) -> A:
    """Return the first page's response with the entries of all pages in its field `entries`, or with the first `most` of them. A
    page may end before its page_size, for its size in bytes.

    `ask` sends a request and returns the response; its errors are passed on. Mutates `request`.
    """
    first: Any = ask(request)
    while _asks_for_more(request, first, entries, most):
        _append(first, ask(request), entries)
    return first  # type: ignore[no-any-return]


async def whole_async(ask: Callable[[Any], Awaitable[A]], request: Any, entries: str, most: int | None = None) -> A:
    """As `whole`."""
    first: Any = await ask(request)
    while _asks_for_more(request, first, entries, most):
        _append(first, await ask(request), entries)
    return first  # type: ignore[no-any-return]


def _asks_for_more(request: Any, first: Any, entries: str, most: int | None) -> bool:
    """Make `request` that for the next page; return False if there is none, or no further entry is wanted. Mutates `request`."""
    if most is not None:
        left = most - len(getattr(first, entries))
        if left <= 0:
            return False
        request.page_size = left
    request.page_token = first.next_page_token
    return bool(request.page_token)


def _append(first: Any, page: Any, entries: str) -> None:
    getattr(first, entries).extend(getattr(page, entries))
    first.next_page_token = page.next_page_token

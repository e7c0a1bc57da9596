"""Paged list calls to a router, read to the last page."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

A = TypeVar("A")


def whole(ask: Callable[[Any], A], request: Any, entries: str) -> A:
    """Return the first page's response with the entries of all pages in its field `entries`.

    `ask` sends a request and returns the response; its errors are passed on. Mutates `request`.
    """
    first: Any = ask(request)
    while first.next_page_token:
        request.page_token = first.next_page_token
        _append(first, ask(request), entries)
    return first  # type: ignore[no-any-return]


async def whole_async(ask: Callable[[Any], Awaitable[A]], request: Any, entries: str) -> A:
    """As `whole`."""
    first: Any = await ask(request)
    while first.next_page_token:
        request.page_token = first.next_page_token
        _append(first, await ask(request), entries)
    return first  # type: ignore[no-any-return]


def _append(first: Any, page: Any, entries: str) -> None:
    getattr(first, entries).extend(getattr(page, entries))
    first.next_page_token = page.next_page_token

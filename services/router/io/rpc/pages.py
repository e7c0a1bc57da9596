"""Pages of long lists, as https://google.aip.dev/158 has them."""

from __future__ import annotations

import base64
import binascii
import hashlib
from typing import Any, TypeVar

import msgspec

P = TypeVar("P")

DEFAULT_PAGE = 50
MAX_PAGE = 1_000


class InvalidPageToken(ValueError):
    """A token that is none, or was given for another request or by another replica."""


def page_size(asked: int, default: int = DEFAULT_PAGE) -> int:
    """How many entries to tell at most. Raises ValueError for fewer than none."""
    if asked < 0:
        raise ValueError("must not be negative")
    return min(asked or default, MAX_PAGE)


def token_after(position: object, request: Any, router_id: str) -> str:
    """The token for what comes after `position` in the list that `request` asks `router_id` for; JSON must have a form for it."""
    text = msgspec.json.encode((_digest(request, router_id), position))
    return base64.urlsafe_b64encode(text).decode().rstrip("=")


def position_of(request: Any, router_id: str, kind: type[P]) -> P | None:
    """Where the page that `request` asks for begins: after this position, or (None) with the list. Raises InvalidPageToken."""
    token: str = request.page_token
    if not token:
        return None
    try:
        text = base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True)
        digest, position = msgspec.json.decode(text, type=tuple[str, kind])  # type: ignore[valid-type]
    except (binascii.Error, ValueError, msgspec.MsgspecError):
        raise InvalidPageToken("page_token: not one that this router has given") from None
    if digest != _digest(request, router_id):
        raise InvalidPageToken("page_token: given for another request, or by another router")
    return position


def _digest(request: Any, router_id: str) -> str:
    """Stands for all of a request but what may change from page to page. What positions mean is each replica's own."""
    same = type(request)()
    same.CopyFrom(request)
    same.ClearField("page_size")
    same.ClearField("page_token")
    text = f"{router_id} {request.DESCRIPTOR.full_name} ".encode() + same.SerializeToString(deterministic=True)
    return hashlib.sha256(text).hexdigest()[:16]

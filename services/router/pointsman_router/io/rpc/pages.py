"""Page sizes and page tokens of long lists, after https://google.aip.dev/158."""

from __future__ import annotations

import base64
import binascii
import hashlib
from typing import Any, TypeVar

import msgspec

P = TypeVar("P")

DEFAULT_PAGE = 50
MAX_PAGE = 1_000
# Size above which a page ends early, bytes. By default gRPC's clients take messages of at most 4 MiB.
MAX_PAGE_BYTES = 3_000_000


class InvalidPageToken(ValueError):
    """Raised for a page token that is malformed, or was issued for another request or by another replica."""


def page_size(asked: int, default: int = DEFAULT_PAGE) -> int:
    """Return the maximum number of entries of a page: `asked`, or `default` if it is 0, up to MAX_PAGE. Raises ValueError if it
    is negative."""
    if asked < 0:
        raise ValueError("must not be negative")
    return min(asked or default, MAX_PAGE)


def token_after(position: object, request: Any, router_id: str) -> str:
    """Return the token of the page after `position` in the list that `router_id` returns for `request`. `position` must be
    encodable as JSON."""
    text = msgspec.json.encode((_digest(request, router_id), position))
    return base64.urlsafe_b64encode(text).decode().rstrip("=")


def position_of(request: Any, router_id: str, kind: type[P]) -> P | None:
    """Return the position after which the requested page begins; None for the first page. Raises InvalidPageToken."""
    token: str = request.page_token
    if not token:
        return None
    try:
        text = base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True)
        digest, position = msgspec.json.decode(text, type=tuple[str, kind])  # type: ignore[valid-type]
    except (binascii.Error, ValueError, msgspec.MsgspecError):
        raise InvalidPageToken("page_token: not a token of this router") from None
    if digest != _digest(request, router_id):
        raise InvalidPageToken("page_token: issued for another request, or by another router")
    return position


def _digest(request: Any, router_id: str) -> str:
    """Return a digest of the request without the fields that may change between pages. It includes the router id, because a
    position has a meaning only on the replica that issued it."""
    same = type(request)()
    same.CopyFrom(request)
    same.ClearField("page_size")
    same.ClearField("page_token")
    text = f"{router_id} {request.DESCRIPTOR.full_name} ".encode() + same.SerializeToString(deterministic=True)
    return hashlib.sha256(text).hexdigest()[:16]

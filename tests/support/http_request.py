"""Plain HTTP requests that bypass the environment's proxies, for requests that the official client does not send."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True)
class Reply:
    """An HTTP response of any status."""

    status: int
    body: bytes

    @property
    def text(self) -> str:
        """The body as text."""
        return self.body.decode()

    def json(self) -> Any:
        """Return the body's JSON value. Raises ValueError if the body is not JSON."""
        return json.loads(self.body)


def serves(url: str, path: str = "/health") -> bool:
    """Return whether a GET of `path` returns 200."""
    try:
        return ask(url + path, timeout_s=5).status == 200
    except OSError:
        return False


def ask(
    url: str,
    body: Any = None,
    *,
    method: str | None = None,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = 60,
) -> Reply:
    """Send a GET, or a POST of `body` (bytes as they are, other values as JSON). Raises OSError if there is no response."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(
        url, data=data, headers={"Content-Type": "application/json", **(headers or {})}, method=method
    )
    try:
        with _opener.open(request, timeout=timeout_s) as answer:
            return Reply(answer.status, answer.read())
    except urllib.error.HTTPError as refused:
        with refused:
            return Reply(refused.code, refused.read())

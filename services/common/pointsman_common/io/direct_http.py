"""HTTP requests of commands to engines, agents and gateways, which are on networks of the fleet's own."""

from __future__ import annotations

import ssl
import urllib.request
from http.client import HTTPException, HTTPResponse


def open_directly(
    request: str | urllib.request.Request, timeout_s: float, tls: ssl.SSLContext | None = None
) -> HTTPResponse:
    """Return the answer to a request, or to a GET of a URL. Must be closed. Raises OSError; for an error status HTTPError.

    A proxy in the environment is meant for outside addresses such as the hub, so it is passed over, as services' clients and gRPC
    do. `tls`: of https; None: the system's authorities.
    """
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=tls))
    try:
        answer: HTTPResponse = opener.open(request, timeout=timeout_s)
    except HTTPException:
        raise OSError("what answers there does not speak HTTP") from None
    return answer

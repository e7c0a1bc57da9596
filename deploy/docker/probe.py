#!/opt/pointsman/bin/python
"""Health probe for containers without curl: `pointsman-probe URL`.

Exit status: 0 if the URL answers 200; otherwise 1, with the reason on stderr; 2 for wrong arguments.
"""

from __future__ import annotations

import os
import sys
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from urllib.parse import urlsplit

TIMEOUT_S = 3.0


def status_of(url: str) -> int:
    """Return the status that a URL answers. A proxy of the environment, which Docker may give to each container, is not asked.
    Raises OSError and HTTPException."""
    parts = urlsplit(url)
    if parts.scheme == "https":
        import ssl  # A plain probe needs none of its CPU time.

        trusted = ssl.create_default_context(cafile=os.environ.get("POINTSMAN_TLS_CA") or None)
        connection: HTTPConnection = HTTPSConnection(parts.netloc, timeout=TIMEOUT_S, context=trusted)
    else:
        connection = HTTPConnection(parts.netloc, timeout=TIMEOUT_S)
    try:
        connection.request("GET", parts.path)
        return connection.getresponse().status
    finally:
        connection.close()


def main(arguments: list[str]) -> int:
    """Run one probe; return the exit status."""
    if len(arguments) != 1 or urlsplit(arguments[0]).scheme not in ("http", "https"):
        print("usage: pointsman-probe URL", file=sys.stderr)
        return 2
    try:
        reason = "" if (status := status_of(arguments[0])) == 200 else f"HTTP {status}"
    except (HTTPException, OSError) as error:
        reason = str(error) or type(error).__name__
    if reason:
        print(f"{arguments[0]}: {reason}", file=sys.stderr)
    return 1 if reason else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

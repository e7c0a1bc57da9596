"""Which of several routers a command asks: the first that accepts a connection."""

from __future__ import annotations

import re
import socket

from pointsman_common.core.addresses import parse_address
from pointsman_common.core.router_targets import SCHEME, router_targets

# Timeout of a connection when one of several routers is chosen, s.
CONNECT_S = 2.0


def router_of(text: str) -> str:
    """Return gRPC's target of the router that a user gives (router_targets); of several the first that accepts a connection, else
    the first. Raises ValueError if there is none."""
    routers = router_targets(text)
    if len(routers) == 1:
        return routers[0]
    return next(filter(_accepts, routers), routers[0])


def _accepts(router: str) -> bool:
    """Return whether something listens at a target."""
    scheme, _, rest = router.partition(":")
    try:
        if SCHEME.match(router) and scheme in ("unix", "unix-abstract"):
            path = re.sub("^//(?=/)", "", rest)
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(CONNECT_S)
                connection.connect(f"\0{rest}" if scheme == "unix-abstract" else path)
            return True
        address = parse_address((rest if SCHEME.match(router) else router).rpartition("/")[2])
        socket.create_connection((address.host, address.port), CONNECT_S).close()
    except (OSError, ValueError):
        return False
    return True

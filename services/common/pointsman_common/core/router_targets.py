"""Routers as a user gives them to a command, as gRPC's targets. Pure."""

from __future__ import annotations

import re

ROUTER_PORT = 50051
# gRPC's own forms: unix:PATH, dns:HOST:PORT, ipv4:ADDRESS:PORT,ADDRESS:PORT and so on, but no host of such a name.
SCHEME = re.compile(r"(unix|unix-abstract|vsock|dns|ipv4|ipv6|xds):(?!\d+$)")
# Their lists have commas of their own.
_OWN_LIST = re.compile(r"ipv[46]:(?!\d+$)")
_URL = re.compile(r"(https?|grpcs?)://([^/]+)/*")


def router_targets(text: str) -> list[str]:
    """Return gRPC's targets of one router or of several with commas between, each HOST, HOST:PORT, a URL or a target in one of
    gRPC's own forms (unix:PATH, ipv4:A:PORT,B:PORT). Raises ValueError if there is none."""
    parts = [text] if _OWN_LIST.match(text.strip()) else text.split(",")
    targets = [_target(part.strip()) for part in parts if part.strip()]
    if not targets:
        raise ValueError("HOST:PORT is needed")
    return targets


def _target(router: str) -> str:
    if url := _URL.fullmatch(router):
        router = url[2]
    if SCHEME.match(router) or "/" in router or re.search(r":\d+$", router):
        return router
    return f"{router}:{ROUTER_PORT}"

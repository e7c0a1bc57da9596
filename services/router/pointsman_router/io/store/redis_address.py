"""Where a shared Redis is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """Where a Redis is. `urls`: its servers, of which one is the master, or a node of the cluster if `cluster`. `sentinels`: URLs
    of Sentinels, which name the server of the master `master`; the only one of `urls` then has its user, database and TLS."""

    urls: tuple[str, ...]
    sentinels: tuple[str, ...] = ()
    master: str = "mymaster"
    cluster: bool = False

"""Checks of the routers' Redis by `pointsman doctor`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from pointsman_cli.doctor_findings import TIMEOUT_S, Finding
from pointsman_common.core.addresses import Address
from pointsman_common.io.redis_failures import redis_reason
from pointsman_common.io.settings import split_urls


@dataclass(frozen=True, slots=True)
class RedisUrls:
    """Where the routers' Redis is, by their settings redis_url, redis_sentinels and redis_master."""

    servers: tuple[str, ...]
    sentinels: tuple[str, ...]
    master: str

    @classmethod
    def of(cls, servers: str, sentinels: str, master: str) -> RedisUrls | None:
        """Return the URLs in these settings; None without a Redis. Raises ValueError for a text that is no list of URLs."""
        urls = cls(split_urls(servers), split_urls(sentinels), master)
        return urls if urls.servers else None


def redis_findings(urls: RedisUrls) -> Iterator[Finding]:
    """Yield findings about the Redis, and about the Sentinels. The first one that names a master is believed, as by routers."""
    if not urls.sentinels:
        yield from map(redis_finding, urls.servers)
        return
    master = ""
    for sentinel in urls.sentinels:
        named, finding = _sentinel_finding(sentinel, urls.master)
        master = master or named
        yield finding
    if master:
        url = urlsplit(urls.servers[0])
        user = url.netloc.rpartition("@")[0]
        yield redis_finding(url._replace(netloc=f"{user}@{master}").geturl())
    else:
        found = f"no Sentinel names the master {urls.master}"
        yield Finding(Finding.FAIL, "Redis", found, "routers that use it place degraded")


def _place(url: str) -> str:
    """Return what may be shown of a URL: HOST:PORT, or the path of a Unix socket."""
    parts = urlsplit(url)
    return parts.netloc.rpartition("@")[2] or parts.path


def _sentinel_finding(url: str, name: str) -> tuple[str, Finding]:
    """Return HOST:PORT of the master that a Sentinel names, empty if it names none that is up, and what was found."""
    import redis

    check = f"Sentinel {_place(url)}"
    try:
        with redis.Redis.from_url(url, socket_timeout=TIMEOUT_S, decode_responses=True) as client:
            state = client.sentinel_masters().get(name)
    except (redis.RedisError, ValueError) as error:
        advice = "check it, and its address, user, password and TLS in redis_sentinels"
        return "", Finding(Finding.WARN, check, redis_reason(error), advice)
    if state is None:
        return "", Finding(Finding.WARN, check, f"watches no master {name}", "set redis_master to the name in its file")
    master = str(Address(state["ip"], state["port"]))
    if not state["is_master"] or state["is_sdown"] or state["is_odown"]:
        return "", Finding(Finding.WARN, check, f"the master {master} is down", "wait until it names another one")
    return master, Finding(Finding.OK, check, f"names the master {master}")


def redis_finding(url: str) -> Finding:
    """Return whether the routers' Redis answers, and rejects writes instead of evicting keys when its memory is full."""
    # The import takes two fifths of the start time of these commands, so only the command that is given a URL imports it.
    import redis

    check = f"Redis {_place(url)}"
    try:
        with redis.Redis.from_url(url, socket_timeout=TIMEOUT_S) as client:
            version = client.info("server")["redis_version"]
            # Not read with CONFIG, because the user of make-secrets.sh is not an administrator.
            policy = client.info("memory")["maxmemory_policy"]
    except redis.exceptions.NoPermissionError:
        if not urlsplit(url).username:
            found = "answers, but lets nobody do anything without a user"
            return Finding(Finding.FAIL, check, found, "give redis_url a user and its password")
        return Finding(
            Finding.WARN, check, "answers, but its user may not run INFO", "add +info to check maxmemory-policy"
        )
    except redis.RedisError as error:
        return Finding(Finding.FAIL, check, redis_reason(error), "routers that use it place degraded")
    except ValueError as error:  # a parameter of the URL that is none
        return Finding(Finding.FAIL, check, str(error), "correct redis_url")
    except LookupError:
        found = "answers, but does not tell how it evicts keys, as a Sentinel or a proxy"
        return Finding(
            Finding.FAIL, check, found, "give redis_url the address of a Redis, and redis_sentinels those of Sentinels"
        )
    if policy != "noeviction":
        return Finding(Finding.WARN, check, f"{version}, maxmemory-policy {policy}", "set maxmemory-policy noeviction")
    return Finding(Finding.OK, check, f"{version}, {policy}")

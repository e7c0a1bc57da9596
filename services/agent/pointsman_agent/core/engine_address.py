"""Parsing of an engine's address and its options, as in the setting `engines`. Pure.

`http://127.0.0.1:8000?events=tcp://127.0.0.1:5557&replay=tcp://127.0.0.1:5558&topic=kv&advertise=http://10.0.0.7:8000&gpus=0,1`
`http://127.0.0.1:8000?kv=mooncake&bootstrap=http://10.0.0.7:8998&kv-role=both`
`http://127.0.0.1:8000?hardware=h200&long-prefill-token-threshold=4096`
`http://127.0.0.1:8000?storage=ceph-1`
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit, urlunsplit

from pointsman_common.core.addresses import address_of_url, parse_address

_OPTIONS = frozenset(
    {
        "events",
        "replay",
        "topic",
        "advertise",
        "gpus",
        "kv",
        "bootstrap",
        "kv-role",
        "hardware",
        "long-prefill-token-threshold",
        "storage",
    }
)
KV_PROTOCOLS = ("mooncake", "nixl")
KV_ROLES = ("both", "producer", "consumer")


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """One engine to monitor.

    The options from `kv` on exist because a running vLLM does not report their values by itself.
    """

    url: str  # where the agent reaches the engine, without a trailing slash
    advertise: str  # where gateways reach it, without a trailing slash
    events: str = ""  # ZMQ address to connect to; of several ranks that of rank 0; empty: query the engine
    replay: str = ""  # as `events`
    topic: str = ""  # ZMQ topic to subscribe to at `events`; empty: all topics
    gpus: tuple[int, ...] | None = None  # device indices on this node; None: not given
    kv: str = ""  # protocol of the engine's KV connector, one of KV_PROTOCOLS; empty: not given
    bootstrap: str = ""  # base URL at which gateways and other engines reach its bootstrap server; empty: not given
    kv_role: str = "both"  # the sides of a transfer that the engine supports, one of KV_ROLES
    hardware: str = ""  # one word shared by all engines that are equally fast; empty: the name that NVML reports
    long_prefill_token_threshold: int = 0  # the engine's setting of this name, tokens; 0: none
    # One word for the store in which the engine keeps KV blocks, equal for all engines that load each other's; empty: its own.
    storage: str = ""

    @property
    def host(self) -> str:
        """Host of `url`, without brackets."""
        return address_of_url(self.url).host

    def instance_id(self, rank: int | None) -> str:
        """Return the fleet-wide name: host:port of the advertised URL, with "/rank" unless `rank` is None."""
        name = str(address_of_url(self.advertise))
        return name if rank is None else f"{name}/{rank}"


def parse_engine_address(text: str) -> EngineAddress:
    """Parse an engine's URL and options. Raises ValueError with the reason if they are invalid."""
    if ",http" in text:
        raise ValueError(f"not an engine URL: {text!r}; several are separated by blanks, not by commas")
    parts = urlsplit(text)
    url = _base(text, urlunsplit((parts.scheme, parts.netloc, parts.path, "", "")))
    try:
        options = dict(parse_qsl(parts.query, strict_parsing=bool(parts.query)))
    except ValueError:
        raise ValueError(f"engine {url}: options are NAME=VALUE with & between, not {parts.query!r}") from None
    if unknown := sorted(set(options) - _OPTIONS):
        raise ValueError(
            f"engine {url} has the unknown option {', '.join(unknown)} (known: {', '.join(sorted(_OPTIONS))})"
        )
    for name in ("events", "replay"):
        if name in options and not _is_zmq_address(options[name]):
            raise ValueError(f"engine {url}: {name} is no ZMQ address to connect to: {options[name]!r}")
    if "replay" in options and "events" not in options:
        raise ValueError(f"engine {url} has a replay address without an events address")
    gpus = options.get("gpus")
    if gpus is not None and not all(index.isascii() and index.isdigit() for index in gpus.split(",") if index):
        raise ValueError(f"engine {url}: gpus are indices of devices with commas between, such as 0,1, not {gpus!r}")
    advertise = _base(text, options["advertise"]) if "advertise" in options else url
    kv = options.get("kv", "")
    if kv and kv not in KV_PROTOCOLS:
        raise ValueError(f"engine {url} has the unknown KV protocol {kv!r} (known: {', '.join(KV_PROTOCOLS)})")
    if "bootstrap" in options and kv not in ("", "mooncake"):
        raise ValueError(f"engine {url} has a bootstrap address, which is Mooncake's, with kv={kv}")
    role = options.get("kv-role", "both")
    if role not in KV_ROLES or ("kv-role" in options and not kv):
        raise ValueError(f"engine {url} has the KV role {role!r}: with a KV protocol, one of {', '.join(KV_ROLES)}")
    long_prefill_token_threshold = options.get("long-prefill-token-threshold", "0")
    if not re.fullmatch(r"[0-9]{1,9}", long_prefill_token_threshold):
        raise ValueError(
            f"engine {url}: long-prefill-token-threshold is a number of tokens, not {long_prefill_token_threshold!r}"
        )
    return EngineAddress(
        url=url,
        advertise=advertise,
        events=options.get("events", ""),
        replay=options.get("replay", ""),
        topic=options.get("topic", ""),
        gpus=None if gpus is None else tuple(int(index) for index in gpus.split(",") if index),
        kv=kv,
        bootstrap=_base(text, options["bootstrap"]) if "bootstrap" in options else "",
        kv_role=role,
        hardware=options.get("hardware", ""),
        long_prefill_token_threshold=int(long_prefill_token_threshold),
        storage=options.get("storage", ""),
    )


def offset_port(endpoint: str, rank: int) -> str:
    """Return `endpoint` for data-parallel rank `rank`. vLLM adds the rank to the number after the last colon of an endpoint that
    contains "tcp", which may also be an ipc:// path (`ipc:///run/kv/tcp-events:1`)."""
    base, _, number = endpoint.rpartition(":")
    if not rank or "tcp" not in endpoint or not number.isdecimal():
        return endpoint
    return f"{base}:{int(number) + rank}"


def _is_zmq_address(text: str) -> bool:
    scheme, rest = text.partition("://")[::2]
    if scheme == "tcp":
        try:
            return parse_address(rest).host != "*"
        except ValueError:
            return False
    return scheme in ("ipc", "inproc") and bool(rest)


def _base(text: str, url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"not an engine URL: {text!r}; write http://HOST:PORT or https://HOST:PORT")
    try:
        parts.port  # noqa: B018 - it is read when it is asked for
    except ValueError:
        raise ValueError(f"not an engine URL: {text!r}; the port must be a number up to 65535") from None
    return url.rstrip("/")

"""An engine's address with its options, as the settings give it. Pure.

`http://127.0.0.1:8000?events=tcp://127.0.0.1:5557&replay=tcp://127.0.0.1:5558&topic=kv&advertise=http://10.0.0.7:8000&gpus=0,1`
`http://127.0.0.1:8000?kv=mooncake&bootstrap=http://10.0.0.7:8998&kv-role=both`
`http://127.0.0.1:8000?hardware=h200&long-prefill-token-threshold=4096`
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit, urlunsplit

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
    }
)
KV_PROTOCOLS = ("mooncake", "nixl")
KV_ROLES = ("both", "producer", "consumer")


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """What to watch. `url` is where the agent reaches the engine, `advertise` where gateways do, both without a trailing
    slash. `events` and `replay` are ZMQ addresses to connect to, empty to ask the engine. `gpus` are indices on this node,
    None when not given. `kv` is the protocol of its KV connector (one of KV_PROTOCOLS), `bootstrap` the base URL at which
    gateways and other engines reach its bootstrap server, both empty when not given; `kv_role` (one of KV_ROLES) is the sides of
    a transfer that it can be. `hardware` is one word for all engines that are equally fast (empty: as NVML says),
    `long_prefill_token_threshold` its long_prefill_token_threshold (tokens, 0 for none). A running vLLM tells none of these by
    itself."""

    url: str
    advertise: str
    events: str = ""
    replay: str = ""
    topic: str = ""
    gpus: tuple[int, ...] | None = None
    kv: str = ""
    bootstrap: str = ""
    kv_role: str = "both"
    hardware: str = ""
    long_prefill_token_threshold: int = 0

    @property
    def host(self) -> str:
        """Host of `url`, as a ZMQ address needs it."""
        host = urlsplit(self.url).hostname or ""
        return f"[{host}]" if ":" in host else host

    @property
    def port(self) -> int:
        """Port of `url`."""
        return _port(self.url)

    def instance_id(self, rank: int | None) -> str:
        """The fleet-wide name: host:port of the advertised URL, and the rank where there are several."""
        parts = urlsplit(self.advertise)
        host = parts.hostname or ""
        name = f"{f'[{host}]' if ':' in host else host}:{_port(self.advertise)}"
        return name if rank is None else f"{name}/{rank}"


def parse_engine_address(text: str) -> EngineAddress:
    """Read an engine's URL and options. Raises ValueError that names what is wrong."""
    parts = urlsplit(text)
    url = _base(text, urlunsplit((parts.scheme, parts.netloc, parts.path, "", "")))
    options = dict(parse_qsl(parts.query, strict_parsing=bool(parts.query)))
    if unknown := set(options) - _OPTIONS:
        raise ValueError(f"unknown option {', '.join(sorted(unknown))} of engine {url}")
    if "replay" in options and "events" not in options:
        raise ValueError(f"engine {url} has a replay address without an events address")
    gpus = options.get("gpus")
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
    if not (long_prefill_token_threshold.isascii() and long_prefill_token_threshold.isdigit()):
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
    )


def connect_address(endpoint: str | None, host: str) -> str:
    """The address at which a subscriber reaches `endpoint` of an engine on `host`: wildcards become the host."""
    if not endpoint:
        return ""
    for wildcard in ("tcp://*:", "tcp://0.0.0.0:", "tcp://[::]:", "tcp://:::"):
        if endpoint.startswith(wildcard):
            return f"tcp://{host}:{endpoint.removeprefix(wildcard)}"
    return endpoint


def offset_port(endpoint: str, rank: int) -> str:
    """`endpoint` of data-parallel rank `rank`: its port plus the rank, as vLLM counts."""
    if not rank or not endpoint.startswith("tcp://"):
        return endpoint
    base, _, port = endpoint.rpartition(":")
    return f"{base}:{int(port) + rank}"


def _port(url: str) -> int:
    parts = urlsplit(url)
    return parts.port or (443 if parts.scheme == "https" else 80)


def _base(text: str, url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"not an engine URL: {text!r}")
    parts.port  # noqa: B018 - raises ValueError for a port that is none
    return url.rstrip("/")

"""gRPC channels to a router, and the options of servers: keepalive detects a dead peer within seconds, and the message limit fits
long prompts' keys."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio

from pointsman_common.io.reloading_file import ReloadingFile
from pointsman_common.io.tls import TlsSettings

# Maximum size of a received message, bytes. A snapshot chunk or a prompt's keys are far smaller. The limit keeps one oversized
# message from exhausting the memory of the process.
MAX_MESSAGE_BYTES = 64 << 20

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Despite its name, the timeout of a connection attempt; a call that does not wait for the connection fails with it. On a
    # busy machine or across zones a handshake takes seconds. Only the other two options set the time of the next attempt.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Also the interval of lookups while no connection succeeds, since a router's name may have moved; gRPC's own is 30 s.
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
    # A proxy in the environment is meant for outside addresses such as the hub; gRPC would also dial routers through it.
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
]

SERVER_OPTIONS: list[tuple[str, int]] = [
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A restarted router must be able to bind its port, and two routers must not share a port by accident.
    ("grpc.so_reuseport", 0),
]

# Value that a stream's `read()` returns after the peer has ended the stream. The type stubs of grpc lack it.
END_OF_STREAM: Any = grpc.aio.EOF  # type: ignore[attr-defined]


def open_channel(address: str, *, own_connection: bool = False) -> grpc.aio.Channel:
    """Return a channel to "HOST:PORT", with TLS if the environment sets it (TlsSettings).

    The channel dials on first use and again after each loss of the connection. Channels of one process to one address share a
    connection unless `own_connection` is set. Raises ValueError and OSError for TLS settings that cannot be used.
    """
    options = [*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", int(own_connection))]
    if (credentials := TlsSettings().for_channel()) is not None:
        return grpc.aio.secure_channel(address, credentials, options=options)
    return grpc.aio.insecure_channel(address, options=options)


class ReloadingChannel:
    """Starts calls to one router, each with the certificates that are in the files at its start.

    Replaces a grpc.aio.Channel for services with stream_stream and unary_unary methods. Must be closed.
    """

    def __init__(self, address: str) -> None:
        """Raises as open_channel."""
        self._channel = ReloadingFile(TlsSettings().files(), lambda: open_channel(address))
        self._opened = [self._channel.value]

    def stream_stream(self, *method: Any, **how: Any) -> Any:
        """As grpc.aio.Channel.stream_stream; each stream starts on the newest channel."""
        return lambda *request, **call: self._newest().stream_stream(*method, **how)(*request, **call)

    def unary_unary(self, *method: Any, **how: Any) -> Any:
        """As grpc.aio.Channel.unary_unary; each call starts on the newest channel."""
        return lambda *request, **call: self._newest().unary_unary(*method, **how)(*request, **call)

    async def close(self) -> None:
        """End all streams."""
        for channel in self._opened:
            await channel.close(None)

    def _newest(self) -> grpc.aio.Channel:
        if (renewed := self._channel.reload_if_changed()) is not None:
            # Streams on the older channel continue there until they end.
            self._opened.append(renewed)
        return self._channel.value


def open_blocking_channel(address: str) -> grpc.Channel:
    """As open_channel, for programs without an event loop."""
    if (credentials := TlsSettings().for_channel()) is not None:
        return grpc.secure_channel(address, credentials, options=CHANNEL_OPTIONS)
    return grpc.insecure_channel(address, options=CHANNEL_OPTIONS)

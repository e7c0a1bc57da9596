"""How every service dials a router: keepalive that notices a dead peer within seconds, and room for long prompts' keys."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio

from pointsman.common.io.reloading_file import ReloadingFile
from pointsman.common.io.tls import TlsSettings

# 64 MiB: a snapshot chunk or a prompt's keys stay far below, a mistake does not take the process down.
MAX_MESSAGE_BYTES = 64 << 20

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Despite its name how long a connection attempt may take; a call that does not wait for the connection fails with it. On a
    # busy machine or across zones a handshake takes seconds. When to try again is up to the other two alone.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # A proxy that the environment names is for what is outside, like the hub; gRPC would dial routers through it.
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
    # A restarted router must get its port; two routers on one port must not share it by accident.
    ("grpc.so_reuseport", 0),
]

# What `read()` of a stream returns when the peer has ended it; the stubs of grpc do not know it.
END_OF_STREAM: Any = grpc.aio.EOF  # type: ignore[attr-defined]


def open_channel(address: str, *, own_connection: bool = False) -> grpc.aio.Channel:
    """A channel to "HOST:PORT", by TLS where the environment says so. Dialling happens on first use and again whenever the
    connection is lost. Channels of one process to one address share a connection, but for those with an `own_connection`. Raises
    ValueError and OSError for TLS settings that cannot be used."""
    options = [*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", int(own_connection))]
    if (credentials := TlsSettings().for_channel()) is not None:
        return grpc.aio.secure_channel(address, credentials, options=options)
    return grpc.aio.insecure_channel(address, options=options)


class ReloadingChannel:
    """Where streams to one router begin, for as long as the process lives: each with the certificates that are in their files
    then. Stands for a grpc.aio.Channel of a service that has streams only. To be closed."""

    def __init__(self, address: str) -> None:
        """Raises as open_channel."""
        self._channel = ReloadingFile(TlsSettings().files(), lambda: open_channel(address))
        self._opened = [self._channel.value]

    def stream_stream(self, *method: Any, **how: Any) -> Any:
        """As a channel's; the streams begin on whatever is newest."""
        return lambda *request, **call: self._newest().stream_stream(*method, **how)(*request, **call)

    async def close(self) -> None:
        """End all streams."""
        for channel in self._opened:
            await channel.close(None)

    def _newest(self) -> grpc.aio.Channel:
        if (renewed := self._channel.reload_if_changed()) is not None:
            # What runs on the older one goes on there until it ends.
            self._opened.append(renewed)
        return self._channel.value


def open_blocking_channel(address: str) -> grpc.Channel:
    """As open_channel, for programs without an event loop."""
    if (credentials := TlsSettings().for_channel()) is not None:
        return grpc.secure_channel(address, credentials, options=CHANNEL_OPTIONS)
    return grpc.insecure_channel(address, options=CHANNEL_OPTIONS)

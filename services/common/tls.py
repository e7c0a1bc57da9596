"""TLS on a router's doors, from files: what it shows and asks for, and how others dial it."""

from __future__ import annotations

import ssl
from pathlib import Path

import grpc
from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class Tls(BaseSettings):
    """Environment POINTSMAN_TLS_*. Nothing set: plain text. Files are PEM, read when a door is opened or dialled."""

    model_config = SettingsConfigDict(env_prefix="POINTSMAN_TLS_", env_ignore_empty=True)

    cert: Path | None = Field(
        None, description="certificate chain of this process: a router's for its door; what others show to routers"
    )
    key: Path | None = Field(None, description="private key of `cert`")
    ca: Path | None = Field(
        None,
        description="certificates that peers are checked against: whoever dials a router does so by TLS, and a router refuses "
        "clients without a certificate",
    )

    def for_server(self) -> grpc.ServerCredentials | None:
        """A router's credentials; None for plain text. Raises ValueError for half of what is needed, OSError for a file that
        cannot be read."""
        pair = self._pair()
        ca = _read(self.ca)
        if pair is None:
            if ca is not None:
                raise ValueError("POINTSMAN_TLS_CA without POINTSMAN_TLS_CERT: a router needs a certificate of its own")
            return None
        return grpc.ssl_server_credentials([pair], ca, require_client_auth=ca is not None)

    def for_console(self) -> ssl.SSLContext | None:
        """The same for a router's console: clients show certificates where gRPC asks for them. Raises as `for_server`, and
        ssl.SSLError (an OSError) for files that are no certificates."""
        if self.for_server() is None or self.cert is None:
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=self.ca)
        context.load_cert_chain(self.cert, self.key)
        context.verify_mode = ssl.CERT_REQUIRED if self.ca else ssl.CERT_NONE
        return context

    def for_channel(self) -> grpc.ChannelCredentials | None:
        """What to dial a router with; None for plain text. Raises as `for_server`."""
        pair = self._pair()
        if (ca := _read(self.ca)) is None:
            if pair is not None:
                raise ValueError("POINTSMAN_TLS_CERT without POINTSMAN_TLS_CA: whom to trust is not said")
            return None
        key, cert = pair or (None, None)
        return grpc.ssl_channel_credentials(ca, key, cert)

    def _pair(self) -> tuple[bytes, bytes] | None:
        key, cert = _read(self.key), _read(self.cert)
        if (key is None) is not (cert is None):
            raise ValueError("POINTSMAN_TLS_CERT and POINTSMAN_TLS_KEY belong together")
        return None if key is None or cert is None else (key, cert)


def _read(file: Path | None) -> bytes | None:
    return None if file is None else file.read_bytes()

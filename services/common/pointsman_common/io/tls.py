"""TLS of servers and clients, from certificate files. Renewed certificates need no restart: each new connection, on either side,
checks whether the files have changed."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from pointsman_common.io.reloading_file import ReloadingFile


class TlsSettings(BaseSettings):
    """Environment POINTSMAN_TLS_*. If nothing is set, connections are plain text. Files are PEM, read again when they change."""

    model_config = SettingsConfigDict(env_prefix="POINTSMAN_TLS_", env_ignore_empty=True)

    cert: Path | None = Field(
        None,
        description="certificate chain of this process (PEM): a router's server certificate, another service's client "
        "certificate",
    )
    key: Path | None = Field(None, description="private key of `cert` (PEM)")
    ca: Path | None = Field(
        None,
        description="CA certificates (PEM) that peers' certificates are verified with; set: clients dial routers by TLS, and a "
        "router refuses clients without a certificate",
    )

    def files(self) -> list[Path]:
        """Return the files that are set."""
        return [file for file in (self.cert, self.key, self.ca) if file is not None]

    def for_server(self) -> grpc.ServerCredentials | None:
        """Return a router's credentials; None for plain text. Raises ValueError for incomplete settings and for files that are
        no certificates or keys, OSError for files that cannot be read."""
        if self._pair() is None:
            if self.ca is not None:
                raise ValueError("POINTSMAN_TLS_CA without POINTSMAN_TLS_CERT: a router needs a certificate of its own")
            return None
        assert self.cert is not None
        assert self.key is not None
        return server_credentials(self.cert, self.key, self.ca)

    def for_console(self) -> ssl.SSLContext | None:
        """Return the context for a router's console; None for plain text. Clients need a certificate if gRPC clients need one.
        Raises as `for_server`."""
        if self._pair() is None or self.cert is None:
            return None
        return server_context(self.cert, self.key, self.ca)

    def for_channel(self) -> grpc.ChannelCredentials | None:
        """Return the credentials to dial a router with; None for plain text. Raises as `for_server`."""
        pair = self._pair()
        if self.ca is None:
            if pair is not None:
                raise ValueError(
                    "POINTSMAN_TLS_CERT without POINTSMAN_TLS_CA: a client needs CA certificates to verify routers"
                )
            return None
        _context(ssl.Purpose.SERVER_AUTH, ca=self.ca)
        key, cert = pair or (None, None)
        return grpc.ssl_channel_credentials(self.ca.read_bytes(), key, cert)

    def _pair(self) -> tuple[bytes, bytes] | None:
        if (self.key is None) is not (self.cert is None):
            raise ValueError("POINTSMAN_TLS_CERT and POINTSMAN_TLS_KEY belong together")
        if self.key is None or self.cert is None:
            return None
        return _key_and_chain(self.cert, self.key)


def server_credentials(cert: Path, key: Path, ca: Path | None) -> grpc.ServerCredentials:
    """Return a gRPC server's credentials with the certificate `cert`; with `ca`, clients must send a certificate. The files are
    read again when they change. Raises OSError and ValueError for files that cannot be used."""

    def certificates() -> grpc.ServerCertificateConfiguration:
        if ca is not None:
            _context(ssl.Purpose.CLIENT_AUTH, ca=ca)
        pair = _key_and_chain(cert, key)
        return grpc.ssl_server_certificate_configuration([pair], ca.read_bytes() if ca is not None else None)

    renewed = ReloadingFile([file for file in (cert, key, ca) if file is not None], certificates)
    # gRPC keeps the certificates when this function returns None; the type stubs do not allow None.
    reload_if_changed: Callable[[], Any] = renewed.reload_if_changed
    return grpc.dynamic_ssl_server_credentials(
        renewed.value, reload_if_changed, require_client_authentication=ca is not None
    )


def _key_and_chain(cert: Path, key: Path) -> tuple[bytes, bytes]:
    _context(ssl.Purpose.CLIENT_AUTH, cert, key)
    return key.read_bytes(), cert.read_bytes()


def server_context(cert: Path, key: Path | None, ca: Path | None, protocols: Sequence[str] = ()) -> ssl.SSLContext:
    """Return a listener's context with the certificate `cert`; with `ca`, clients must send a certificate. Each handshake checks
    whether the files have changed. Raises OSError and ValueError for files that cannot be used."""

    def make() -> ssl.SSLContext:
        context = _context(ssl.Purpose.CLIENT_AUTH, cert, key, ca)
        context.verify_mode = ssl.CERT_REQUIRED if ca else ssl.CERT_NONE
        if protocols:
            context.set_alpn_protocols(list(protocols))
        return context

    renewed = ReloadingFile([file for file in (cert, key, ca) if file is not None], make)
    listening = renewed.value

    def choose(connection: ssl.SSLSocket | ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        renewed.reload_if_changed()
        connection.context = renewed.value

    listening.sni_callback = choose
    return listening


def client_context(ca: Path) -> ssl.SSLContext:
    """Return the context for clients of an HTTPS server whose certificate `ca` has signed. Raises OSError and ValueError, with
    the file's name, if the file cannot be used."""
    return _context(ssl.Purpose.SERVER_AUTH, ca=ca)


def _context(
    purpose: ssl.Purpose, cert: Path | None = None, key: Path | None = None, ca: Path | None = None
) -> ssl.SSLContext:
    """Return a context of these files. Raises OSError and ValueError with their names; gRPC reports no error for files that it
    cannot use."""
    for file in (cert, key, ca):
        if file is not None:
            file.read_bytes()
    try:
        context = ssl.create_default_context(purpose, cafile=ca)
    except ssl.SSLError as error:
        raise ValueError(f"{ca}: no certificates in PEM{_reason(error)}") from None
    if cert is None:
        return context
    try:
        context.load_cert_chain(cert, key)
    except ssl.SSLError as error:
        wrong = "no certificate and private key in PEM"
        if error.reason == "KEY_VALUES_MISMATCH":
            wrong = "the private key is another certificate's"
        raise ValueError(f"{cert}, {key or cert}: {wrong}{_reason(error)}") from None
    return context


def _reason(error: ssl.SSLError) -> str:
    return f" ({error.reason})" if error.reason else ""

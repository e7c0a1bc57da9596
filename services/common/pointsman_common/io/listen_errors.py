"""Why an address cannot be listened on, as a sentence that names the setting."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from pydantic_settings import BaseSettings

from pointsman_common.io.settings import holder_of

_REASONS = {
    errno.EADDRINUSE: "another process listens there",
    errno.EACCES: "this user may not listen there (ports below 1,024 need a privilege)",
    errno.EADDRNOTAVAIL: "this machine has no such address",
}


class CannotListen(OSError):
    """An address cannot be listened on. The text is a sentence with the setting, the address and the reason."""


@contextmanager
def listening(settings: BaseSettings, field: str, address: str = "") -> Iterator[None]:
    """Raise CannotListen for an OSError of the block, which opens the socket of a field of `settings`. `address`: what is
    shown; empty: the field's value."""
    try:
        yield
    except CannotListen:
        raise
    except OSError as error:
        place = address or getattr(settings, field)
        raise CannotListen(f"{holder_of(type(settings), field)} {place}: {reason_of(error)}") from None


def reason_of(error: OSError) -> str:
    """Return why an address cannot be listened on."""
    if (error.errno or 0) < 0:  # socket.gaierror
        return f"unknown host name ({error.strerror})"
    return _REASONS.get(error.errno or 0) or error.strerror or str(error)

"""Decodes compressed request bodies piece by piece, and refuses those that would become too large."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Any

if sys.version_info >= (3, 14):
    from compression.zstd import DecompressionParameter, ZstdDecompressor, ZstdError
else:
    from backports.zstd import DecompressionParameter, ZstdDecompressor, ZstdError

# Maximum size of one decoded piece, bytes.
PIECE_BYTES = 64 << 10
# A body that was compressed more than so many times is refused once it is larger than FREE_BYTES: a prompt is compressed about
# 3 to 20 times.
MAX_RATIO = 100
FREE_BYTES = 1 << 20
# Maximum number of members, or frames, of a body: each takes some 40 us, however small, and may decode to nothing.
MAX_MEMBERS = 256
# Binary logarithm of the largest window of a zstd frame, which RFC 8878 recommends to support: 8 MB.
_WINDOW_LOG = 23


class UndecodableBody(Exception):
    """A body is not what its Content-Encoding says."""


class BodyTooDense(Exception):
    """A body was compressed more than MAX_RATIO times, or has more than MAX_MEMBERS members."""


# Decompressors of the standard library for one member of a gzip body, one zlib stream, or one zstd frame. zlib's have what they
# left of their input in `unconsumed_tail`, zstd's keep it themselves.
_STREAMS: dict[str, Callable[[], Any]] = {
    "zstd": lambda: ZstdDecompressor(options={DecompressionParameter.window_log_max: _WINDOW_LOG}),
    "gzip": lambda: zlib.decompressobj(16 + zlib.MAX_WBITS),
    "x-gzip": lambda: zlib.decompressobj(16 + zlib.MAX_WBITS),
    "deflate": lambda: zlib.decompressobj(zlib.MAX_WBITS),
}
# Value of Accept-Encoding.
ACCEPTED = "zstd, gzip, deflate"


def encoding_of(content_encoding: str) -> str | None:
    """Return the encoding that a Content-Encoding names ("": none); None if bodies with it are not decoded."""
    name = content_encoding.strip().lower()
    if name in ("", "identity"):
        return ""
    return name if name in _STREAMS else None


class BodyDecoder:
    """Decodes one body. `encoding`: as encoding_of() returns it, not empty."""

    def __init__(self, encoding: str) -> None:
        self._make = _STREAMS[encoding]
        self._stream = self._make()
        self._begun = False
        self._taken = self._given = 0
        self._members = 1

    @property
    def complete(self) -> bool:
        """Whether the body so far ends where it may end."""
        return not self._begun or bool(self._stream.eof)

    def decode(self, piece: bytes) -> Iterator[bytes]:
        """Yield what the next piece of the body adds, in pieces of at most PIECE_BYTES. Raises UndecodableBody and BodyTooDense.
        Mutates."""
        self._taken += len(piece)
        while True:
            if self._stream.eof:
                if not piece:
                    return
                self._stream, self._members = self._make(), self._members + 1
                if self._members > MAX_MEMBERS:
                    raise BodyTooDense
            try:
                made = self._stream.decompress(piece, PIECE_BYTES)
            except (zlib.error, ZstdError) as error:
                raise UndecodableBody(str(error)) from error
            self._begun = True
            left = self._stream.unused_data if self._stream.eof else getattr(self._stream, "unconsumed_tail", b"")
            if made:
                self._given += len(made)
                if self._given > max(FREE_BYTES, MAX_RATIO * (self._taken - len(left))):
                    raise BodyTooDense
                yield made
            if not left and len(made) < PIECE_BYTES:
                return
            piece = left

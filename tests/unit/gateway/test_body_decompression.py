"""Compressed bodies: the same in whatever pieces they come, and refused early if they would become large."""

from __future__ import annotations

import gzip
import sys
import zlib
from collections.abc import Callable
from contextlib import nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman_gateway.core.body_decompression import (
    FREE_BYTES,
    MAX_MEMBERS,
    MAX_RATIO,
    PIECE_BYTES,
    BodyDecoder,
    BodyTooDense,
    UndecodableBody,
    encoding_of,
)

if sys.version_info >= (3, 14):
    from compression.zstd import compress as zstd
else:
    from backports.zstd import compress as zstd

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "zstd": zstd,
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "deflate": zlib.compress,
}
BODIES = st.binary(max_size=3_000) | st.binary(min_size=1, max_size=40).map(lambda part: part * 5_000)


def decoded(decoder: BodyDecoder, body: bytes, step: int) -> bytes:
    pieces = [piece for at in range(0, len(body), step) for piece in decoder.decode(body[at : at + step])]
    assert max(map(len, pieces), default=0) <= PIECE_BYTES
    return b"".join(pieces)


@pytest.mark.parametrize("encoding", COMPRESS)
@given(body=BODIES, more=st.binary(max_size=100), step=st.integers(1, 300))
def test_a_body_is_decoded_however_it_is_cut(encoding: str, body: bytes, more: bytes, step: int) -> None:
    """Several members, or frames, are one body."""
    sent = COMPRESS[encoding](body) + (COMPRESS[encoding](more) if encoding != "deflate" else b"")
    decoder = BodyDecoder(encoding)
    assert decoded(decoder, sent, step) == body + (more if encoding != "deflate" else b"")
    assert decoder.complete
    cut = BodyDecoder(encoding)
    decoded(cut, COMPRESS[encoding](body)[:-1], step)
    assert not cut.complete


@pytest.mark.parametrize("encoding", COMPRESS)
def test_a_body_of_countless_members_is_refused(encoding: str) -> None:
    """29,000 empty frames are 256 KiB, decode to nothing, and took a second of the event loop."""
    member = COMPRESS[encoding](b"")
    assert decoded(BodyDecoder(encoding), member * MAX_MEMBERS, 1_000) == b""
    with pytest.raises(BodyTooDense):
        decoded(BodyDecoder(encoding), member * (MAX_MEMBERS + 1), 1_000)


@pytest.mark.parametrize("encoding", COMPRESS)
@given(body=st.binary(min_size=20, max_size=200))
def test_what_is_not_compressed_is_refused(encoding: str, body: bytes) -> None:
    decoder = BodyDecoder(encoding)
    try:
        list(decoder.decode(b"{" + body))
    except UndecodableBody:
        return
    assert not decoder.complete


@pytest.mark.parametrize("encoding", COMPRESS)
def test_a_bomb_is_refused_before_it_grows(encoding: str) -> None:
    bomb = COMPRESS[encoding](bytes(64 << 20))
    sizes: list[int] = []
    decoder = BodyDecoder(encoding)

    def decode() -> None:
        for at in range(0, len(bomb), 1_000):
            sizes.extend(len(piece) for piece in decoder.decode(bomb[at : at + 1_000]))

    with pytest.raises(BodyTooDense):
        decode()
    assert sum(sizes) <= max(FREE_BYTES, MAX_RATIO * len(bomb)) < 8 << 20


@pytest.mark.parametrize(
    ("window", "taken"), [("68", True), ("70", False), ("a8", False)], ids=["8 MB", "16 MB", "2 GB"]
)
def test_a_zstd_frame_with_a_large_window_is_refused(window: str, taken: bool) -> None:
    """The library's own limit is 128 MB."""
    # Magic number, no content size, the window, and a last block of one byte.
    frame = bytes.fromhex(f"28b52ffd 00 {window} 090000 61")
    with nullcontext() if taken else pytest.raises(UndecodableBody):
        assert list(BodyDecoder("zstd").decode(frame)) == [b"a"]


def test_names_of_encodings() -> None:
    assert [encoding_of(name) for name in ("", " identity", "GZIP", "zstd")] == ["", "", "gzip", "zstd"]
    assert [encoding_of(name) for name in ("br", "gzip, zstd", "compress")] == [None] * 3

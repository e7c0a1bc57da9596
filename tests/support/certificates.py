"""Certificates for tests, made by openssl: an authority, and certificates that it signs for 127.0.0.1 and localhost."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Signed:
    """A certificate and its key, as PEM files."""

    cert: Path
    key: Path


class Authority:
    """An authority that signs certificates. `ca` is its own certificate."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self.ca = folder / "ca.pem"
        self._key = folder / "ca.key"
        _openssl("req", "-x509", *_fresh(self._key), "-out", self.ca, "-days", "2", "-subj", f"/CN={folder.name}")

    def sign(self, name: str, names: Sequence[str] = ()) -> Signed:
        """Return a certificate for servers and clients on this machine, or for the DNS names `names`."""
        cert, key, request = (self._folder / f"{name}.{kind}" for kind in ("pem", "key", "csr"))
        file = self._folder / "names"
        alternatives = [f"DNS:{name}" for name in names] or ["IP:127.0.0.1", "DNS:localhost"]
        file.write_text(f"subjectAltName={','.join(alternatives)}\n")
        _openssl("req", *_fresh(key), "-out", request, "-subj", f"/CN={name}")
        signing = ("-CA", self.ca, "-CAkey", self._key, "-CAcreateserial", "-extfile", file)
        _openssl("x509", "-req", "-in", request, *signing, "-out", cert, "-days", "2")
        return Signed(cert, key)


def _fresh(key: Path) -> tuple[str | Path, ...]:
    return ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", key)


def _openssl(*words: str | Path) -> None:
    done = subprocess.run(["openssl", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

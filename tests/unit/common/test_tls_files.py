"""What is told of certificate files that cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest

from pointsman_common.io.tls import client_context, server_context
from tests.support.certificates import Authority


def test_it_is_told_which_file_is_wrong_and_what_it_is(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    ours, other = authority.sign("ours"), authority.sign("other")
    text = tmp_path / "text.pem"
    text.write_text("no certificate")
    with pytest.raises(ValueError, match=f"{other.key}: the private key is another certificate's"):
        server_context(ours.cert, other.key, None)
    with pytest.raises(ValueError, match=f"^{text}, {ours.key}: no certificate and private key in PEM"):
        server_context(text, ours.key, None)
    with pytest.raises(ValueError, match=f"^{text}: no certificates in PEM"):
        server_context(ours.cert, ours.key, text)
    with pytest.raises(ValueError, match=f"^{text}: no certificates in PEM"):
        client_context(text)

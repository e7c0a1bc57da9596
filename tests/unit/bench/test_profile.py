"""To which component a sample of a profile belongs."""

from __future__ import annotations

import pytest

from bench.profile import components

ROUTER = (
    "run (services/router/pointsman_router/io/main.py:30);submit (services/router/pointsman_router/io/router.py:297)"
)
TOKENS = "tokens (services/gateway/pointsman_gateway/core/tokens/model_tokenizer.py:200)"


def test_a_sample_belongs_to_the_innermost_own_frame_and_to_what_runs_in_the_end() -> None:
    found = components(
        [
            f"{ROUTER};{TOKENS};encode (tokenizers/models/bpe.rs);merge (libc.so.6) 60",
            f"{ROUTER};{TOKENS} 20",
            f"{ROUTER};dumps (/usr/lib/python3.11/json/__init__.py:231) 15",
            "Thread.run (/usr/lib/python3.11/threading.py:982);lock (x.so);0x7f26cba4524a (libc.so.6) 4",
            "Thread.run (/usr/lib/python3.11/threading.py:982);sem_wait (libc.so.6);0x7f26cba4524a (libc.so.6) 400",
            f"{ROUTER};uv__io_poll (linux.c:1452);epoll_pwait (libc.so.6) 300",
            f"{ROUTER};x (services/common/pointsman_common/io/logs.py:3) 1",
        ]
    )
    assert found == {
        "gateway/core/tokens": (0.8, "libc.so.6 60%, model_tokenizer 20%"),
        "router/io": (0.15, "json 15%"),
        "outside": (0.04, "libc.so.6 4%"),
        "rest": (0.01, "common/io"),
    }
    assert sum(share for share, _ in found.values()) == pytest.approx(1)


def test_names_of_functions_may_have_blanks_and_semicolons_end_frames() -> None:
    [(name, (share, most))] = components(["a b (x) (y.so);f<T, U> (pointsman_agent/core/a.py:1);0xdead 3"]).items()
    assert (name, share, most) == ("agent/core", 1.0, "0xdead 100%")

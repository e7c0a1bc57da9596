"""Structured logs: one JSON object per line for machines, or colours for a terminal. Never log prompts, tokens or secrets."""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import Any, TextIO, cast

import structlog


def configure_logs(service: str, level: str = "info") -> None:
    """Send logs of this process to stderr, each line carrying `service`. Coloured when stderr is a terminal."""
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer() if sys.stderr.isatty() else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        # Each line in one write: processes that share a file would tear each other's.
        logger_factory=structlog.WriteLoggerFactory(cast(TextIO, _Losing(sys.stderr))),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service)


class _Losing:
    """A file whose disk may be full, or whose reader gone: what it does not take is lost. A service never fails for its log."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> Any:
        with contextlib.suppress(OSError):
            return self._file.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._file.flush()

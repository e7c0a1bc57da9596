"""Structured logs: one JSON object per line, or text on a terminal. Never log prompts, tokens or secrets."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from typing import Any, TextIO, cast

import structlog


def configure_logs(service: str, level: str = "info") -> None:
    """Send logs of this process to stderr; each line has the field `service`. If stderr is a terminal, a line is text: time,
    level, event, fields; coloured unless NO_COLOR is set."""
    terminal = sys.stderr.isatty()
    renderer: list[structlog.typing.Processor] = (
        [structlog.dev.ConsoleRenderer(colors="NO_COLOR" not in os.environ, pad_event_to=0)]
        if terminal
        else [_in_order, structlog.processors.JSONRenderer()]
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S" if terminal else "iso", utc=not terminal),
            structlog.processors.format_exc_info,
            *renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        # Writes each line by one call, so that lines of processes that share a file do not mix.
        logger_factory=structlog.WriteLoggerFactory(cast(TextIO, _Losing(sys.stderr))),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service)
    # What libraries warn of, with the same form. Without effect where logging has handlers already, as in tests.
    logging.basicConfig(handlers=[_OfLibraries()], level=logging.WARNING)


class _OfLibraries(logging.Handler):
    """Passes the records of Python's logging on, as lines with the field `logger`."""

    def emit(self, record: logging.LogRecord) -> None:
        """Log a record, unless it is about bytes that are no HTTP, which anybody may send."""
        error = record.exc_info[1] if record.exc_info else None
        if record.name == "aiohttp.server" and getattr(error, "code", None) == 400:
            return
        log = structlog.get_logger()
        log.log(record.levelno, record.getMessage(), logger=record.name, exc_info=record.exc_info)


def _in_order(_: object, __: str, fields: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Return the fields with those first that each line has."""
    first = {name: fields[name] for name in ("timestamp", "level", "service", "event") if name in fields}
    return first | dict(fields)


class _Losing:
    """A text file whose write errors are ignored: a full disk or a closed pipe loses log lines but does not fail the service."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> Any:
        with contextlib.suppress(OSError):
            return self._file.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._file.flush()

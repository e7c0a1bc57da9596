"""The vLLM version that this package is tested with, and what it logs about any other one. Does not import vLLM when it is
loaded."""

from __future__ import annotations

import functools
import logging
import re

# vLLM version that this package is written for and tested with.
TESTED = "0.32"


def running() -> str:
    """Return the version of the vLLM that is installed here."""
    import vllm

    return str(getattr(vllm, "__version__", "of an unknown version"))


def is_tested(version: str) -> bool:
    """Return whether `version` is a release, patch release or build of the tested one."""
    return _numbers(version) == _numbers(TESTED)


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"(\d+)\.(\d+)(?!\d)", version)
    return tuple(map(int, found.groups())) if found else ()


@functools.cache
def warn_if_untested() -> None:
    """Log a warning if this vLLM is not of the tested version: once in each process."""
    if not is_tested(version := running()):
        vllm_logger().warning(
            "pointsman_connector is tested with vLLM %s, this is vLLM %s, %s one: parts that do not fit are left out, each with "
            "a line here (docs/vllm_versions.md has what is known); test it before it serves",
            TESTED,
            version,
            "an older"
            if () < _numbers(version) < _numbers(TESTED)
            else "a newer"
            if _numbers(version)
            else "an unknown",
        )


def warn_without(part: str, error: BaseException) -> None:
    """Log, in one line, that the engine runs without `part` of this package because of `error`."""
    reason = " ".join(str(error).split())
    vllm_logger().warning(
        "pointsman_connector runs without %s: %s: %s (vLLM %s; tested with %s)",
        part,
        type(error).__name__,
        reason,
        running(),
        TESTED,
    )
    vllm_logger().debug("The error's origin", exc_info=error)


def vllm_logger() -> logging.Logger:
    """Return vLLM's logger, which the engine shows; if this vLLM has another one, Python's own."""
    try:
        from vllm.logger import init_logger
    except ImportError:
        return logging.getLogger(__name__)
    logger: logging.Logger = init_logger(__name__)
    return logger

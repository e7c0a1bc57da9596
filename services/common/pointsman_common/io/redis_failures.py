"""What an error of Redis means, with what to change."""

from __future__ import annotations


def redis_reason(error: Exception) -> str:
    """Return the kind of an error that the package redis has raised, and what is wrong."""
    import redis.exceptions  # Programs without a Redis need not have it.

    told = str(error)
    if isinstance(error, redis.exceptions.AuthenticationError):
        # Redis itself tells whoever sends no password how to use its commands.
        told = (
            "it refuses the user or password in redis_url (of a Sentinel: in redis_sentinels), or none is given there"
        )
    return f"{type(error).__name__}: {told}"

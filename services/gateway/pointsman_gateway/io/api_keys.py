"""Valid API keys, from the environment and from a file that is read again when it changes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from pointsman_common.io.reloading_file import ReloadingFile
from pointsman_gateway.core.rate_limits import UNLIMITED
from pointsman_gateway.core.tenants import ANYONE, Client, digest_of, parse_keys

# Minimum interval between two checks of the file, s.
LOOK_AGAIN_S = 1.0


class KeysFromEnvironment(BaseSettings):
    """POINTSMAN_GATEWAY_API_KEYS: lines as in a keys file, separated by line ends or semicolons."""

    model_config = SettingsConfigDict(env_prefix="POINTSMAN_GATEWAY_")

    api_keys: SecretStr | None = Field(
        None,
        description="lines as in api_keys_file, separated by line ends or semicolons; without a flag, because other users of "
        "the machine can read flags",
    )

    def lines(self) -> list[str] | None:
        """Return the lines; None if the variable is not set."""
        return None if self.api_keys is None else self.api_keys.get_secret_value().replace(";", "\n").splitlines()


class ApiKeys:
    """All API keys. Without any source every client is the tenant "default"; a source without keys admits no client."""

    def __init__(self, file: Path | None = None, lines: Iterable[str] | None = None) -> None:
        """Raises ValueError for an invalid line, OSError if `file` cannot be read."""
        self._fixed = None if lines is None else parse_keys(lines, "POINTSMAN_GATEWAY_API_KEYS")
        self._file = ReloadingFile([file], partial(self._read, file)) if file is not None else None
        self._looked_at = -math.inf
        self._clients = self._file.value if self._file is not None else self._fixed or {}

    @property
    def needed(self) -> bool:
        """Whether clients must send a key."""
        return self._file is not None or self._fixed is not None

    @property
    def digests(self) -> set[bytes]:
        """The digests of all keys."""
        return set(self._clients)

    @property
    def limited(self) -> bool:
        """Whether any key has limits."""
        return any(client.limits != UNLIMITED for client in self._clients.values())

    def refresh(self, now: float) -> bool:
        """Read the file again if it has changed (ReloadingFile); return whether the keys were replaced. Mutates.

        The file is checked at most once in LOOK_AGAIN_S. `now` is monotonic s.
        """
        if self._file is None or now - self._looked_at < LOOK_AGAIN_S:
            return False
        self._looked_at = now
        if (clients := self._file.reload_if_changed()) is None:
            return False
        self._clients = clients
        return True

    def client_of(self, authorization: str, x_api_key: str = "") -> Client | None:
        """Return the client whose key is in "Bearer KEY" or in `x_api_key`, or None.

        The key is looked up by its digest. The time of the lookup reveals nothing about keys, because a client cannot choose
        digests.
        """
        if not self.needed:
            return ANYONE
        scheme, _, token = authorization.partition(" ")
        shown = [token.strip()] if scheme.lower() == "bearer" else []
        shown += [x_api_key.strip()] if x_api_key else []
        found = (self._clients.get(digest_of(key)) for key in shown)
        return next((client for client in found if client is not None), None)

    def _read(self, file: Path) -> dict[bytes, Client]:
        read = parse_keys(file.read_text(encoding="utf-8").splitlines(), str(file))
        if twice := read.keys() & (self._fixed or {}).keys():
            raise ValueError(f"{file}: {len(twice)} of its keys are in POINTSMAN_GATEWAY_API_KEYS too")
        return {**(self._fixed or {}), **read}

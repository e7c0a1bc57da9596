"""The API keys in force, from the environment and from a file that is read again when it changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import structlog
from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from pointsman.common.io.reloading_file import Stamps, stamps
from pointsman.gateway.core.rate_limits import UNLIMITED
from pointsman.gateway.core.tenants import ANYONE, Client, digest_of, parse_keys

log = structlog.get_logger()

LOOK_AGAIN_S = 1.0


class KeysFromEnvironment(BaseSettings):
    """POINTSMAN_GATEWAY_API_KEYS: lines as in a keys file, separated by line ends or semicolons."""

    model_config = SettingsConfigDict(env_prefix="POINTSMAN_GATEWAY_")

    api_keys: SecretStr | None = Field(
        None, description="lines as in api_keys_file, separated by line ends or semicolons; no flag: all can see flags"
    )

    def lines(self) -> list[str] | None:
        """The lines, None when the variable is not set."""
        return None if self.api_keys is None else self.api_keys.get_secret_value().replace(";", "\n").splitlines()


class ApiKeys:
    """All keys. Without any source every client is the tenant "default"; a source without keys lets nobody in."""

    def __init__(self, file: Path | None = None, lines: Iterable[str] | None = None) -> None:
        """Raises ValueError for a bad line, OSError when `file` cannot be read."""
        self._file = file
        self._fixed = None if lines is None else parse_keys(lines, "POINTSMAN_GATEWAY_API_KEYS")
        self._seen: Stamps | None = None
        self._looked_at: float | None = None
        self._clients: Mapping[bytes, Client] = self._fixed or {}
        if file is not None:
            self._seen = stamps([file])
            self._clients = self._read(file)

    @property
    def needed(self) -> bool:
        """Whether a key must be shown."""
        return self._file is not None or self._fixed is not None

    @property
    def digests(self) -> set[bytes]:
        """The names of all keys."""
        return set(self._clients)

    @property
    def limited(self) -> bool:
        """Whether any key has limits."""
        return any(client.limits != UNLIMITED for client in self._clients.values())

    def refresh(self, now: float) -> bool:
        """Read the file again if it has changed, looking at most once in LOOK_AGAIN_S; whether other keys are valid now. A file
        that cannot be used changes nothing, and is said once. `now` is monotonic seconds. Mutates."""
        if self._file is None or (self._looked_at is not None and now - self._looked_at < LOOK_AGAIN_S):
            return False
        self._looked_at = now
        try:
            stamp = stamps([self._file])
            if stamp == self._seen:
                return False
            self._seen = stamp
            self._clients = self._read(self._file)
        except (OSError, ValueError) as error:
            log.error("the keys file cannot be used; the keys from before stay", error=str(error))
            return False
        log.info("keys read again", keys=len(self._clients))
        return True

    def client_of(self, authorization: str, x_api_key: str = "") -> Client | None:
        """The client whose key "Bearer KEY" or `x_api_key` shows, or None. A look-up by digest, whose time tells nothing: who
        guesses keys cannot choose their digests."""
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

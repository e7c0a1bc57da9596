"""Maps prompts to sessions: by the client's own session id, else by the longest earlier prompt that the prompt continues."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass


def bounded_id(text: str) -> str:
    """Return `text` if it is printable ASCII without spaces and 1 to 128 characters long, else a name made from its hash."""
    if 0 < len(text) <= 128 and text.isascii() and text.isprintable() and " " not in text:
        return text
    with suppress(UnicodeError):  # of a header, whose bytes are characters
        text = text.encode("latin-1").decode()
    return f"h-{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:32]}"


@dataclass
class _Tail:
    session: str
    # The key that followed the tail in the first prompt that continued it. Another follower means another conversation.
    follower: int | None = None


class Sessions:
    """The tails of recent prompts: (tenant, last block key) -> session. At most `capacity` tails are kept; the least recently
    used tail is removed first.

    A prompt that contains the tail of an earlier one continues that session, unless a prompt that differs after the tail
    continued it before. Then the prompt is a fork (another conversation over the same system prompt) and gets a new session. A
    turn costs one dictionary look-up for each key that it adds; a prompt that continues no session costs one for each of its
    keys.
    """

    def __init__(self, capacity: int = 100_000) -> None:
        self._capacity = capacity
        self._tails: dict[str, dict[int, _Tail]] = {}
        self._recent: OrderedDict[tuple[str, int], None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._recent)

    def resolve(self, tenant: str, keys: Sequence[int], *, hint: str, fresh: str) -> str:
        """Return the session of a prompt with block keys `keys`, and keep the prompt's tail. `hint` is the client's own session
        id (empty: none), `fresh` the id of a new session. Mutates."""
        session = bounded_id(hint) if hint else (self._continued(tenant, keys) or fresh)
        if keys:
            self._remember(tenant, keys[-1], session)
        return session

    def find(self, tenant: str, keys: Sequence[int]) -> str | None:
        """Return the session that `keys` continue, or None. Does not mutate."""
        found = self._longest(tenant, keys)
        return found[0].session if found else None

    def _longest(self, tenant: str, keys: Sequence[int]) -> tuple[_Tail, int | None] | None:
        tails = self._tails.get(tenant)
        if not tails:
            return None
        follower = None
        for key in reversed(keys):
            if key in tails:
                tail = tails[key]
                return None if follower is not None and tail.follower not in (None, follower) else (tail, follower)
            follower = key
        return None

    def _continued(self, tenant: str, keys: Sequence[int]) -> str | None:
        found = self._longest(tenant, keys)
        if found is None:
            return None
        tail, follower = found
        if follower is not None:
            tail.follower = follower
        return tail.session

    def _remember(self, tenant: str, key: int, session: str) -> None:
        tails = self._tails.setdefault(tenant, {})
        known = tails.get(key)
        if known is None or known.session != session:
            tails[key] = _Tail(session)
        self._recent[tenant, key] = None
        self._recent.move_to_end((tenant, key))
        while len(self._recent) > self._capacity:
            old_tenant, old = self._recent.popitem(last=False)[0]
            del self._tails[old_tenant][old]
            if not self._tails[old_tenant]:
                del self._tails[old_tenant]

"""A simulated Redis that runs the routers' own scripts, and its clients, whose connections can be slow, cut, or lose replies."""

from __future__ import annotations

import asyncio
import json
import math
import zlib
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Mapping, Sequence
from hashlib import sha1
from typing import Any

import lupa
import redis.exceptions

from tests.support.virtual import costs
from tests.support.virtual.charging import Charges
from tests.support.virtual.loop import EPOCH
from tests.support.virtual.network import NETWORK_CONTEXT, Network, here

NAME = "redis"
# Probability that a command to a flaky Redis has no reply before its timeout. Half of these commands are carried out late.
LOST_REPLIES = 0.3
# Maximum delay of a command that is carried out late, s.
LATEST_S = 2.0
# Number of fields of a hash that one HSCAN returns.
PAGE = 3
# Minimum number of fields of a hash that counts as prebuilt. HSCAN returns pages of its real size (COUNT) of such a hash.
MANY_FIELDS = 1_000
# Maximum delay of a message that is not late, s.
SHORT_DELAY_S = 0.01


class VirtualRedis:
    """The data of a Redis, and the commands that the scripts use. Expiry times are in ms of Redis' wall clock."""

    def __init__(self) -> None:
        self.down = False
        self.flaky = False
        self.stopped_until = 0.0
        self.busy_until = 0.0
        """When the commands so far are done, s. Redis carries out one command after the other."""
        self.clock_s = 0.0
        """Error of Redis' wall clock, s."""
        self._values: dict[str, Any] = {}
        self._expiry: dict[str, float] = {}
        # Sorted set -> lower bound of its scores.
        self._least: dict[str, float] = {}
        self._scripts: dict[str, Callable[[Any, Any], Any]] = {}
        self._commands: dict[str, Callable[..., Any]] = {}
        self._lua = lupa.LuaRuntime()

    def wipe(self) -> None:
        """Delete all data, as a restart without persistence does."""
        self._values.clear()
        self._expiry.clear()

    def run(self, script: str, keys: Sequence[str], args: Sequence[object]) -> Any:
        """Run a Lua script; return its result as redis-py does."""
        if script not in self._scripts:
            self._scripts[script] = self._lua.execute(
                "local call, decode, sha1hex = ... ; return function(KEYS, ARGV) "
                "local redis = {call = call, pcall = call, sha1hex = sha1hex} ; local cjson = {decode = decode}"
                f"\n{script}\nend",
                self._call,
                lambda text: self._table(json.loads(text)),
                lambda text: sha1(text.encode()).hexdigest(),
            )
        words = [arg.decode() if isinstance(arg, bytes) else str(arg) for arg in args]
        answer = self._scripts[script](self._lua.table_from(keys), self._lua.table_from(words))
        return self._plain(answer)

    def prebuild(self, pool: str, sessions: Mapping[str, str]) -> None:
        """Add sessions of a pool, with their owners, that expire in an hour."""
        key = f"pointsman:{{default:{pool}}}:affinity"
        for session, owner in sessions.items():
            self._hset(key, session, owner)
            self._zadd(f"{key}_expiry", str((self._now() + 3_600.0) * 1e3), session)

    def hash(self, key: str) -> dict[str, str]:
        """Return a copy of a hash; empty if there is none."""
        return dict(self._live(key) or {})

    def fields(self, key: str) -> dict[str, str]:
        """Return a hash without a copy. The caller must not change the hash."""
        fields: dict[str, str] = self._live(key) or {}
        return fields

    def _table(self, value: Any) -> Any:
        return self._lua.table_from(value, recursive=True) if isinstance(value, list) else value

    def _plain(self, value: Any) -> Any:
        if isinstance(value, str | int):
            return value
        if isinstance(value, float):
            return int(value)
        return [self._plain(value[at]) for at in range(1, len(value) + 1)] if lupa.lua_type(value) == "table" else value

    def _live(self, key: str) -> Any:
        if key in self._expiry and self._now() * 1e3 >= self._expiry[key]:
            self._values.pop(key, None)
            del self._expiry[key]
        return self._values.get(key)

    def _call(self, command: str, *raw: Any) -> Any:
        carry_out = self._commands.get(command)
        if carry_out is None:
            carry_out = self._commands[command] = getattr(self, f"_{command.lower()}")
        return carry_out(*[argument if isinstance(argument, str) else _word(argument) for argument in raw])

    def _now(self) -> float:
        return EPOCH + asyncio.get_running_loop().time() + self.clock_s

    def _time(self) -> Any:
        now = self._now()
        return self._table([str(int(now)), str(int(now % 1 * 1e6))])

    def _get(self, key: str) -> str | None:
        value: str | None = self._live(key)
        return value

    def _set(self, key: str, value: str) -> str:
        self._values[key] = value
        return "OK"

    def _setrange(self, key: str, at: str, value: str) -> int:
        assert (at, value) == ("0", "")
        return len(self._live(key) or "")

    def _del(self, *keys: str) -> int:
        for key in keys:
            self._values.pop(key, None)
            self._expiry.pop(key, None)
        return len(keys)

    def _hget(self, key: str, name: str) -> str | None:
        return (self._live(key) or {}).get(name)

    def _hexists(self, key: str, name: str) -> int:
        return int(name in (self._live(key) or {}))

    def _hset(self, key: str, *pairs: str) -> int:
        found = self._values[key] = self._live(key) or {}
        found.update(zip(pairs[::2], pairs[1::2], strict=True))
        return len(pairs) // 2

    def _hdel(self, key: str, *names: str) -> int:
        found = self._live(key) or {}
        for name in names:
            found.pop(name, None)
        return len(names)

    def _pexpire(self, key: str, ms: str) -> int:
        self._expiry[key] = self._now() * 1e3 + float(ms)
        return 1

    def _persist(self, key: str) -> int:
        return 1 if self._live(key) is not None and self._expiry.pop(key, None) is not None else 0

    def _pttl(self, key: str) -> float:
        return self._expiry[key] - self._now() * 1e3 if self._live(key) and key in self._expiry else -1.0

    def _zadd(self, key: str, score: str, name: str) -> int:
        self._values.setdefault(key, {})[name] = float(score)
        self._least[key] = min(self._least.get(key, math.inf), float(score))
        return 1

    def _zscore(self, key: str, name: str) -> str | None:
        score = (self._live(key) or {}).get(name)
        return None if score is None else repr(score)

    def _zrem(self, key: str, name: str) -> int:
        return self._hdel(key, name)

    def _zremrangebyscore(self, key: str, least: str, most: str) -> int:
        found = self._live(key) or {}
        return self._hdel(key, *[name for name, score in found.items() if float(least) <= score <= float(most)])

    def _unlink(self, *keys: str) -> int:
        return self._del(*keys)

    def _zcard(self, key: str) -> int:
        return len(self._live(key) or {})

    def _zrange(self, key: str, first: str, last: str, scores: str = "") -> Any:
        found = sorted((self._live(key) or {}).items(), key=lambda pair: (pair[1], pair[0]))
        found = found[int(first) : len(found) if last == "-1" else int(last) + 1]
        if not scores:
            return self._table([name for name, _ in found])
        assert scores == "WITHSCORES"
        return self._table([word for name, score in found for word in (name, repr(score))])

    def _zrangebyscore(self, key: str, least: str, most: str, *_: str) -> Any:
        if float(most) < self._least.get(key, -math.inf):
            return self._table([])
        found = self._live(key) or {}
        self._least[key] = min(found.values(), default=math.inf)
        return self._table(sorted(name for name, score in found.items() if float(least) <= score <= float(most)))


def _word(argument: Any) -> str:
    return str(int(argument)) if isinstance(argument, float) and argument.is_integer() else str(argument)


class Client:
    """The part of redis-py's client that RedisStore uses, for the node that created it.

    `charges`: charges Redis for its work, and the node for reading replies (None: no charges).
    """

    def __init__(self, network: Network, store: VirtualRedis, timeout_s: float, charges: Charges | None = None) -> None:
        self._network, self._store, self._timeout_s = network, store, timeout_s
        self._charges = charges
        self._scans: dict[str, list[tuple[int, str]]] = {}
        self._node = here()

    def register_script(self, script: str) -> Callable[..., Awaitable[Any]]:
        """Return a function that runs the script."""

        async def call(keys: Sequence[str], args: Sequence[object]) -> Any:
            changes = self._charges.changes(args) if self._charges is not None else 0.0
            return await self._ask(lambda: self._store.run(script, keys, args), changes)

        return call

    async def hscan(self, key: str, cursor: int, count: int) -> tuple[int, dict[str, str]]:
        """Return the cursor of the next page (0 after the last) and a page of a hash.

        Pages have PAGE fields whatever `count` is, except in the hashes of a prebuilt fleet.
        """

        def page() -> tuple[int, dict[str, str]]:
            # Ordered by a hash of the field's name, as a scan of a hash table: a change of other fields does not move a field.
            fields = sorted((zlib.crc32(name.encode()), name, value) for name, value in self._store.hash(key).items())
            rest = [field for field in fields if field[0] >= cursor]
            nxt = rest[PAGE][0] if len(rest) > PAGE else 0
            return nxt, {name: value for number, name, value in rest if not nxt or number < nxt}

        def long_page() -> tuple[int, dict[str, str]]:
            # A page of a large hash, which is sorted only for its first page.
            if not cursor:
                self._scans[key] = sorted((zlib.crc32(name.encode()), name) for name in self._store.fields(key))
            ordered, fields = self._scans[key], self._store.fields(key)
            first = bisect_left(ordered, (cursor, ""))
            nxt = ordered[first + count][0] if first + count < len(ordered) else 0
            last = bisect_left(ordered, (nxt, "")) if nxt else len(ordered)
            return nxt, {name: fields[name] for _, name in ordered[first:last] if name in fields}

        many = len(self._store.fields(key)) >= MANY_FIELDS
        found: tuple[int, dict[str, str]] = await self._ask(long_page if many else page)
        return found

    async def hgetall(self, key: str) -> dict[str, str]:
        """Return a whole hash."""
        found: dict[str, str] = await self._ask(lambda: self._store.hash(key))
        return found

    async def aclose(self) -> None:
        """Do nothing: there is no connection to close."""

    async def _ask(self, command: Callable[[], Any], changes: float = 0.0) -> Any:
        rng, loop = self._network.rng, asyncio.get_running_loop()
        if not self._node.alive:
            raise redis.exceptions.ConnectionError("this process is gone")
        if self._store.down:
            raise redis.exceptions.ConnectionError("connection refused")
        if self._network.is_cut(self._node.name, NAME):
            await asyncio.sleep(self._timeout_s)
            raise redis.exceptions.TimeoutError("timed out")
        if self._store.flaky and rng.random() < LOST_REPLIES:
            late = rng.random() < 0.5
            loop.call_later(rng.uniform(0.0, LATEST_S) if late else 0.0, self._late, command, context=NETWORK_CONTEXT)
            await asyncio.sleep(self._timeout_s)
            raise redis.exceptions.TimeoutError("timed out")
        await asyncio.sleep(self._delay_s())
        if (wait_s := max(self._store.stopped_until, self._store.busy_until) - loop.time()) > self._timeout_s:
            loop.call_later(wait_s, self._late, command, context=NETWORK_CONTEXT)
            await asyncio.sleep(self._timeout_s)
            raise redis.exceptions.TimeoutError("timed out")
        await asyncio.sleep(max(wait_s, 0.0))
        if not self._node.alive or self._store.down:
            raise redis.exceptions.ConnectionError("connection lost")
        answer = command()
        if self._charges is None:
            await asyncio.sleep(self._delay_s())
            return answer
        reply = answer[1] if isinstance(answer, tuple) else answer
        fields = self._charges.fields(reply) if isinstance(reply, dict) else 0.0
        serves_s = costs.REDIS_COMMAND_S + fields * costs.REDIS_FIELD_S + changes * costs.REDIS_CHANGE_S
        self._store.busy_until = loop.time() + serves_s
        if max(wait_s, 0.0) + serves_s > self._timeout_s:
            await asyncio.sleep(self._timeout_s - max(wait_s, 0.0))
            raise redis.exceptions.TimeoutError("timed out")
        await asyncio.sleep(self._delay_s() + serves_s)
        self._charges.parsed(fields)
        return answer

    def _delay_s(self) -> float:
        delay_s = self._network.delay_s()
        if delay_s > SHORT_DELAY_S:
            self._node.late.append((asyncio.get_running_loop().time(), delay_s))
        return delay_s

    def _late(self, command: Callable[[], Any]) -> None:
        if not self._store.down:
            command()

"""Counts the KV of the sessions of one pool that are under way: how much each has, and how likely it needs it again soon. Pure.

    weighted size = sum over sessions of weight x size, plus the copies of shared prefixes, plus what earlier owners of the pool
                    stored of their idle sessions (inherited_sessions.py)

A session's size is the tokens of its last prompt and answer (of all open prompts, while several are open), less the tokens that
it shared with other sessions at its first request. Its weight is 1 while a request is open, else the chance that it returns
within KEEP_S (return_chances.py), whether its blocks are still cached or evicted: evicted ones are needed again just the same. A
session returns when its request arrives, even if that waits then. A shared prefix counts once for each session that has it and
is idle for less than KEEP_S, but for at most one copy on each instance. So what a family of sub-agents shared counts no longer
when all of them are done.

Idle sessions are listed by kind of answer and bin of idle time, with the sum of each list. So the weighted size costs
O(kinds x bins), and a session's change O(1), whatever the number of sessions. Times in s on one clock.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from math import prod

import msgspec

from pointsman_common.core.block_keys import KEY_TOKENS
from pointsman_router.core.admission.inherited_sessions import InheritedSessions
from pointsman_router.core.admission.return_chances import KEEP_S, ReturnChances
from pointsman_router.core.idle_sessions import BINS, EDGES_S, KINDS, AnswerKind, IdleSessions, answer_kind, bin_of

# Maximum number of sessions of a pool that are counted. Beyond it those that are idle for longest are forgotten.
MAX_SESSIONS = 200_000
# Number of open requests of one session from which another one does not continue the session: a name must not stand for any
# number of conversations.
MOST_OPEN = 8
# Value of CountedSession.bin for a session with an open request.
OPEN = -1
# First bin of sessions whose shared prefixes do not count.
COLD_BIN = bin_of(KEEP_S)
# Follower of a tail that no request has continued yet, and of one that belongs to several conversations.
_NONE_YET, _SEVERAL = -1, -2


class CountedSession(msgspec.Struct, gc=False):
    """One session. Only SessionLedger changes it."""

    name: str  # TENANT/SESSION_ID; the request's id if that has no session
    tenant: str  # only prompts of the same tenant continue it; empty: none
    tokens: int = 0  # its last prompt and answer
    open: int = 0  # number of its open requests
    open_tokens: int = 0  # their prompts
    since: float = 0.0  # when its last answer ended, s
    kind: AnswerKind = AnswerKind.FIRST_OTHER  # how its last answer ended
    turns: int = 0  # number of its answers
    bin: int = OPEN  # how long it has been idle (return_chances.py), or OPEN
    asked: bool = False  # whether a request of it has arrived since `since`
    shared: int = 0  # tokens that it has in common with other sessions, up to the key `group`
    group: int = 0  # key of the last block of what it shares, if `shared` is not 0
    tail: int = 0  # the last key of its last prompt
    tail_at: int = -1  # its place
    middle: int = 0  # the key in the middle of what is not shared
    middle_at: int = -1  # its place
    counted: float = 0.0  # its part of its tenant's sum
    over: bool = False  # its client has ended it, while a request was open
    parent: str = ""  # the session that started it; empty: none, or unknown

    @property
    def size(self) -> int:
        """Tokens of KV that only this session has."""
        return max((self.open_tokens if self.open else self.tokens) - self.shared, 0)


class SessionLedger:
    """The sessions of one pool by name. `max_sessions`: maximum number of them, those with open requests apart."""

    def __init__(self, max_sessions: int = MAX_SESSIONS) -> None:
        self.chances = ReturnChances()
        self.sessions: dict[str, CountedSession] = {}
        self._max = max_sessions
        self._instances = 1
        self._open_sum = self._shared_sum = 0
        self._sums = [[0] * BINS for _ in KINDS]
        # By kind and bin, in the order in which they became idle.
        self._idle: list[list[OrderedDict[str, None]]] = [[OrderedDict() for _ in range(BINS)] for _ in KINDS]
        # Number of them that have not asked.
        self._watched = [[0] * BINS for _ in KINDS]
        # Key at the end of a shared prefix -> (sessions that have it, those in bins from COLD_BIN on left out; its tokens).
        self._groups: dict[int, tuple[int, int]] = {}
        self._tenants: dict[str, float] = {}
        # Tail key -> (session, the key that followed it in the request that continued it).
        self._tails: dict[int, tuple[str, int]] = {}
        # Place of a tail key in its prompt -> number of tails.
        self._tail_places: dict[int, int] = {}
        # Session -> the sessions that it started.
        self._children: dict[str, dict[str, None]] = {}
        self._inherited = InheritedSessions(self.chances)

    def __len__(self) -> int:
        return len(self.sessions)

    def knows(self, name: str) -> bool:
        """Return whether a session, or a sub-agent that it started, is counted."""
        return name in self.sessions or name in self._children

    def hosted_by(self, instances: int) -> None:
        """Set how many instances may hold a copy of a shared prefix. Mutates; O(shared prefixes) if the number changes."""
        if instances != self._instances:
            self._instances = instances
            self._shared_sum = sum(self._copies(*group) for group in self._groups.values())

    def weighted(self) -> float:
        """Return the weighted size in tokens, as of the last `advance`. O(kinds x bins)."""
        total = float(self._open_sum + self._shared_sum) + self._inherited.weighted()
        presence = self.chances.presence
        for kind, sums in zip(KINDS, self._sums, strict=True):
            if any(sums):
                total += sum(map(prod, zip(presence, self.chances.chances(kind), sums, strict=True)))
        return total

    def weight(self, name: str) -> float:
        """Return the part of an idle session in `weighted`, what it shares left out; 0 for any other. O(bins)."""
        session = self.sessions.get(name)
        if session is None or session.open:
            return 0.0
        chance = self.chances.chances(session.kind)[session.bin]
        return self.chances.presence[session.bin] * chance * session.size

    def of_tenant(self, tenant: str) -> float:
        """Return the weighted size of a tenant's sessions, each by its weight when its bin last changed."""
        return self._tenants.get(tenant, 0.0)

    def continued(self, name: str, tenant: str, keys: Sequence[int], *, dry: bool = False) -> str:
        """Return why a request continues a session under way, as one word; empty if it does not. O(places of tails). Unless
        `dry`, notes which prompt continued which, so that a prefix that several conversations share is recognised. Mutates
        then."""
        session = self.sessions.get(name)
        if session is not None and (session.open < MOST_OPEN or _has(keys, session.tail_at, session.tail)):
            return "session"
        # A key depends on all before it, so it has the same place in every prompt.
        last = max((at for at in self._tail_places if _get(keys, at) in self._tails), default=-1)
        if last < 0:
            return ""
        follower = _get(keys, last + 1)
        return self._continues(
            keys[last], *self._tails[keys[last]], _NONE_YET if follower is None else follower, tenant, dry=dry
        )

    def known_prefix(self, name: str, keys: Sequence[int]) -> int:
        """Return how many leading tokens of a prompt are those of its session's last prompt, as far as two keys show; 0 for a
        new session."""
        session = self.sessions.get(name)
        if session is None:
            return 0
        for at, key in ((session.tail_at, session.tail), (session.middle_at, session.middle)):
            if _has(keys, at, key):
                return (at + 1) * KEY_TOKENS
        return 0

    def asked(self, name: str) -> None:
        """Count the return of an idle session whose request has arrived, and may wait. Mutates; O(1)."""
        session = self.sessions.get(name)
        if session is not None and not session.open:
            self._returned(session)

    def opened(
        self,
        name: str,
        tenant: str,
        prompt_tokens: int,
        keys: Sequence[int],
        cached: int,
        now: float,
        *,
        parent: str = "",
    ) -> CountedSession:
        """Count a placed request. `cached`: tokens of its prompt that some instance has; in a session's first prompt they are
        shared with other sessions. `parent`: the session that started its session. Mutates; O(1)."""
        session = self.sessions.get(name)
        if session is None:
            if len(self.sessions) >= self._max:
                self._forget_oldest()
            session = self.sessions[name] = CountedSession(name, tenant)
            self._join(session, keys, min(cached, prompt_tokens))
            if parent and parent != name:
                session.parent = parent
                self._children.setdefault(parent, {})[name] = None
        else:
            if not session.open:
                self._returned(session)
                self._unlist(session)
                if session.bin >= COLD_BIN:
                    self._count_shared(session, 1)
                session.bin = OPEN
            else:
                self._open_sum -= session.size
            if session.shared and keys and not _has(keys, session.shared // KEY_TOKENS - 1, session.group):
                self._leave(session)
        session.open += 1
        session.over = False
        session.open_tokens += prompt_tokens
        session.tokens = prompt_tokens
        if keys:
            self._mark(session, keys)
        size = session.size
        self._open_sum += size
        self._count(session, float(size))
        return session

    def closed(
        self, name: str, prompt_tokens: int, output_tokens: int, finish_reason: str, now: float, *, lasts: bool = True
    ) -> None:
        """Count the end of a request that `opened` counted with these prompt tokens. `lasts`: whether its session may have
        another one. That of a sub-agent ends with the first answer that calls no tool: its parent has its result then.
        Mutates; O(1)."""
        if (session := self.sessions.get(name)) is None or not session.open:
            return
        self._open_sum -= session.size
        session.open -= 1
        session.open_tokens = max(session.open_tokens - prompt_tokens, 0)
        session.tokens = prompt_tokens + output_tokens
        session.turns += 1
        if session.open:
            self._open_sum += session.size
            return
        session.open_tokens = 0
        if not lasts or session.over or (session.parent and finish_reason == "STOP"):
            self._drop(session)
            return
        session.since, session.kind, session.bin = now, answer_kind(finish_reason, session.turns), 0
        session.asked = False
        self._list(session)

    def over(self, name: str) -> None:
        """Forget a session that its client has ended, and its sub-agents, each once none of its requests is open; a new request
        begins it anew. Mutates; O(sub-agents)."""
        ending = [name]
        while ending:
            ended = ending.pop()
            for child in (children := self._children.pop(ended, {})):
                self.sessions[child].parent = ""
            ending += children
            if (session := self.sessions.get(ended)) is None:
                continue
            if session.open:
                session.over = True
            else:
                self._unlist(session)
                self._drop(session)

    def advance(self, now: float) -> None:
        """Move idle sessions to the bins of their idle times, and forget those that are idle for longer than the last bin.
        Mutates; O(kinds x bins + moves)."""
        self._inherited.advance(now)
        self.chances.watch(self._watched, now)
        for bins in self._idle:
            for bin_, idle in enumerate(bins):
                while idle:
                    session = self.sessions[next(iter(idle))]
                    if now - session.since < EDGES_S[bin_ + 1]:
                        break
                    self._unlist(session)
                    if bin_ + 1 == BINS:
                        self._drop(session)
                        continue
                    session.bin = bin_ + 1
                    if session.bin == COLD_BIN:
                        self._count_shared(session, -1)
                    self._list(session)

    def idle(self) -> IdleSessions:
        """Return what the next owner of the pool needs of the idle sessions, as of the last `advance`. O(kinds x bins)."""
        inherited, presence = self._inherited.tokens(), self.chances.presence
        own = [list(map(prod, zip(presence, sums, strict=True))) for sums in self._sums]
        tokens = tuple(tuple(map(sum, zip(*sums, strict=True))) for sums in zip(own, inherited, strict=True))
        return IdleSessions(tokens, *self.chances.observed())

    def inherit(self, idle: IdleSessions, age_s: float, now: float) -> None:
        """Count the idle sessions that an earlier owner of the pool stored `age_s` ago. Mutates."""
        self._inherited.take_over(idle, age_s, now)

    def check_invariants(self) -> None:
        """Raise AssertionError if a sum or a list contradicts the sessions."""
        assert sum(not session.open for session in self.sessions.values()) <= self._max
        assert self._shared_sum == sum(self._copies(*group) for group in self._groups.values())
        assert self._open_sum == sum(session.size for session in self.sessions.values() if session.open)
        idle: dict[tuple[int, int], dict[str, int]] = {}
        for session in self.sessions.values():
            if not session.open:
                idle.setdefault((session.kind, session.bin), {})[session.name] = session.size
        for kind in KINDS:
            for bin_ in range(BINS):
                inside = idle.get((kind, bin_), {})
                assert self._idle[kind][bin_].keys() == inside.keys()
                assert self._sums[kind][bin_] == sum(inside.values())
                assert self._watched[kind][bin_] == sum(not self.sessions[name].asked for name in inside)
        assert all((session.bin == OPEN) is bool(session.open) for session in self.sessions.values())
        groups: dict[int, int] = {}
        for session in self.sessions.values():
            if session.shared and session.bin < COLD_BIN:
                groups[session.group] = groups.get(session.group, 0) + 1
        assert groups == {key: members for key, (members, _) in self._groups.items()}
        children: dict[str, set[str]] = {}
        for session in self.sessions.values():
            if session.parent:
                children.setdefault(session.parent, set()).add(session.name)
        assert children == {name: set(of) for name, of in self._children.items()}
        assert all(self.sessions[name].tail == key for key, (name, _) in self._tails.items())
        assert self._tail_places == Counter(self.sessions[name].tail_at for name, _ in self._tails.values())
        counted: dict[str, float] = dict.fromkeys(self._tenants, 0.0)
        for session in self.sessions.values():
            counted[session.tenant] = counted.get(session.tenant, 0.0) + session.counted
        for tenant, total in self._tenants.items():
            assert abs(total - counted[tenant]) <= 1e-6 * (1.0 + abs(total)), tenant

    # ---- shared prefixes and marks ----

    def _continues(self, tail: int, name: str, known: int, follower: int, tenant: str, *, dry: bool) -> str:
        """As `continued`, of a prompt in which the `tail` of session `name` is followed by `follower`, and which was continued
        with `known` before."""
        session = self.sessions[name]
        if session.tenant != tenant or (session.tail_at + 1) * KEY_TOKENS <= session.shared:
            return ""
        if known not in (_NONE_YET, follower):
            follower = _SEVERAL
        if follower != _NONE_YET and not dry:
            self._tails[tail] = name, follower
        return "" if follower == _SEVERAL else "prefix"

    def _join(self, session: CountedSession, keys: Sequence[int], cached: int) -> None:
        count = min(cached // KEY_TOKENS, len(keys))
        if not count:
            return
        session.group, session.shared = keys[count - 1], count * KEY_TOKENS
        self._count_shared(session, 1)

    def _leave(self, session: CountedSession) -> None:
        if session.bin < COLD_BIN:
            self._count_shared(session, -1)
        session.group = session.shared = 0

    def _count_shared(self, session: CountedSession, sign: int) -> None:
        """Count the session (sign 1), or no longer (-1), among those that have its shared prefix, if it has one."""
        if not session.shared:
            return
        members, tokens = self._groups.pop(session.group, (0, session.shared))
        if members + sign:
            self._groups[session.group] = members + sign, tokens
        self._shared_sum += self._copies(members + sign, tokens) - self._copies(members, tokens)

    def _copies(self, members: int, tokens: int) -> int:
        return tokens * min(members, self._instances)

    def _mark(self, session: CountedSession, keys: Sequence[int]) -> None:
        if session.tail_at >= 0:
            self._unmark(session)
        last, first = len(keys) - 1, session.shared // KEY_TOKENS
        session.tail, session.tail_at = keys[last], last
        session.middle_at = min((first + last) // 2, last)
        session.middle = keys[session.middle_at]
        if (other := self._tails.get(session.tail)) is not None:
            self._leave_place(self.sessions[other[0]].tail_at)
        self._tail_places[last] = self._tail_places.get(last, 0) + 1
        self._tails[session.tail] = session.name, _NONE_YET if other is None else _SEVERAL

    def _unmark(self, session: CountedSession) -> None:
        if session.tail_at < 0:
            return
        if self._tails.get(session.tail, ("", 0))[0] == session.name:
            del self._tails[session.tail]
            self._leave_place(session.tail_at)

    def _leave_place(self, at: int) -> None:
        left = self._tail_places[at] - 1
        if left:
            self._tail_places[at] = left
        else:
            del self._tail_places[at]

    # ---- lists and sums ----

    def _list(self, session: CountedSession) -> None:
        self._idle[session.kind][session.bin][session.name] = None
        self._watched[session.kind][session.bin] += not session.asked
        self._sums[session.kind][session.bin] += session.size
        self._count(session, self.chances.chance(session.kind, session.bin) * session.size)

    def _unlist(self, session: CountedSession) -> None:
        """Take an idle session out of its list."""
        del self._idle[session.kind][session.bin][session.name]
        self._watched[session.kind][session.bin] -= not session.asked
        self._sums[session.kind][session.bin] -= session.size

    def _returned(self, session: CountedSession) -> None:
        """Learn that an idle session has a request again, unless an earlier one has arrived and waits. It returns from the bin
        in which its time is counted, though the next one may have begun since."""
        if not session.asked:
            session.asked = True
            self._watched[session.kind][session.bin] -= 1
            self.chances.returned(session.kind, session.bin)

    def _count(self, session: CountedSession, tokens: float) -> None:
        total = self._tenants.get(session.tenant, 0.0) + tokens - session.counted
        session.counted = tokens
        if total > 1e-6:
            self._tenants[session.tenant] = total
        else:
            self._tenants.pop(session.tenant, None)

    def _drop(self, session: CountedSession) -> None:
        """Forget a session that is in no list of idle ones any more."""
        self._count(session, 0.0)
        self._leave(session)
        self._unmark(session)
        if session.parent:
            siblings = self._children[session.parent]
            del siblings[session.name]
            if not siblings:
                del self._children[session.parent]
        del self.sessions[session.name]

    def _forget_oldest(self) -> None:
        """Forget a session that is idle in the longest bin; none if all have open requests."""
        for bin_ in reversed(range(BINS)):
            for kind in KINDS:
                if idle := self._idle[kind][bin_]:
                    session = self.sessions[next(iter(idle))]
                    self._unlist(session)
                    self._drop(session)
                    return


def _get(keys: Sequence[int], at: int) -> int | None:
    return keys[at] if at < len(keys) else None


def _has(keys: Sequence[int], at: int, key: int) -> bool:
    return 0 <= at < len(keys) and keys[at] == key

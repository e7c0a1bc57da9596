"""The headers by which agents' programs name their sessions, and who started whom. Pure.

Each row was seen in a request or a source of the program, in the version that tests/data/agent_headers.json names.
"""

from __future__ import annotations

from dataclasses import dataclass

from pointsman_gateway.core.http_message import Headers

SESSION_HEADER = "X-Session-ID"
# Header by which Dynamo's clients name a request the last one of its session.
FINAL_HEADER = "X-Dynamo-Session-Final"


@dataclass(frozen=True, slots=True)
class Program:
    """The header names of one program. The values of `agent` and `parent` count only beside one of `session`.

    With an `agent` header the session is the program's run, which may have several agents. Each has a prompt, and so a session,
    of its own: SESSION:AGENT, except for the run's first agent. `parent` is then an agent of the run, else a session.
    """

    session: str
    agent: str = ""
    parent: str = ""


# In order of precedence. The first one with a session counts, and its other headers alone.
PROGRAMS = (
    Program(SESSION_HEADER, parent="X-Parent-Session-Id"),  # Pointsman's own clients; OpenCode
    Program("X-Dynamo-Session-ID", parent="X-Dynamo-Parent-Session-ID"),
    Program("X-Claude-Code-Session-Id", "X-Claude-Code-Agent-Id", "X-Claude-Code-Parent-Agent-Id"),
    Program("session-id", "thread-id", "x-codex-parent-thread-id"),  # Codex
    Program("session_id"),  # earlier versions of Codex; pi
    Program("x-session-affinity"),  # pi, AIPerf
)
HEADERS = (
    *dict.fromkeys(name for row in PROGRAMS for name in (row.session, row.agent, row.parent) if name),
    FINAL_HEADER,
)


# A session of all who send one of these would be none.
_NO_ID = frozenset({"", "undefined", "null", "none", "nil", "true", "false"})


@dataclass(frozen=True, slots=True)
class AgentIdentity:
    """What headers tell of a request. The texts are the client's own, of any length; empty: unknown."""

    session: str = ""  # the session's id
    agent: str = ""  # the id of an agent that is not the first one of its run
    parent: str = ""  # the id of the session whose agent started this one
    final: bool = False  # whether the request is the last one of its session


def agent_identity(headers: Headers) -> AgentIdentity:
    """Return what a request's headers tell. What means nothing is ignored."""
    final = headers.get(FINAL_HEADER).lower() in ("true", "1")
    for row in PROGRAMS:
        if not (run := header_id(headers, row.session)):
            continue
        agent, parent = header_id(headers, row.agent), header_id(headers, row.parent)
        if not row.agent:
            return AgentIdentity(run, parent=parent if parent != run else "", final=final)
        if agent in ("", run):
            return AgentIdentity(run, final=final)
        by_first = parent in ("", run, agent)
        return AgentIdentity(f"{run}:{agent}", agent, run if by_first else f"{run}:{parent}", final)
    return AgentIdentity(final=final)


def header_id(headers: Headers, name: str) -> str:
    """Return an id; empty if there is none, or one that programs write for a value that they do not have."""
    return "" if (found := headers.get(name)).strip().lower() in _NO_ID else found

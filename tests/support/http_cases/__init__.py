"""HTTP/1.1 requests as bytes, gathered from outside sets (cases.toml), sent to a server whose answers are checked."""

from __future__ import annotations

import asyncio
import json
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).with_name("cases.toml")
# Request sent after a case. Its answer shows whether server and client still agree where a request begins.
NEXT = b"GET /livez HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"
WANTS = ("accept", "close", "refuse", "error", "either", "cut")


@dataclass(frozen=True)
class HttpCase:
    """Bytes to send, and what the server must do with them. cases.toml explains the fields."""

    id: str
    group: str
    want: str
    rfc: str
    source: str
    send: bytes
    answers: int = 1


@dataclass(frozen=True)
class Outcome:
    """Statuses of the answers to a case, without 1xx.

    `next`: status of the request sent after the case; 0 if the connection was closed before, None if no answer came.
    `silent`: nothing happened in time.
    """

    statuses: tuple[int, ...]
    next: int | None
    silent: bool = False

    def __str__(self) -> str:
        words = [str(status) for status in self.statuses]
        if self.silent:
            words.append("silence")
        elif not self.next:
            words.append("closed")
        elif not 200 <= self.next < 300:
            words.append(f"then {self.next}")
        return ", ".join(words)


def load(model: str) -> list[HttpCase]:
    """Return all cases; their chat requests name `model`."""
    content = tomllib.loads(FILE.read_text(encoding="utf-8"))
    macros: dict[str, str] = content.pop("macros")
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "set the points"}], "max_tokens": 1})
    macros |= {"JSON": body, "N": str(len(body)), "X": f"{len(body):X}", "LENGTH": str(len(macros["SMUGGLED"]))}
    return [
        HttpCase(
            case["id"],
            group,
            case["want"],
            case["rfc"],
            case["from"],
            _expanded(case["send"], macros).encode("latin-1"),
            case.get("answers", 1),
        )
        for group, cases in content.items()
        for case in cases["cases"]
    ]


def _expanded(text: str, macros: dict[str, str]) -> str:
    def replaced(found: re.Match[str]) -> str:
        if found[1] in macros:
            return macros[found[1]]
        what, _, times = found[1].rpartition("*")
        return what.replace("\\r", "\r").replace("\\n", "\n") * int(times)

    return re.sub(r"\$\{([^}]+)\}", replaced, text)


def answers_in(data: bytes, *, head: bool, ended: bool) -> list[int]:
    """Return statuses of the whole answers in `data`, without 1xx. `head`: the first has no body. `ended`: no data follows."""
    statuses: list[int] = []
    while (end := data.find(b"\r\n\r\n")) >= 0:
        fields = data[:end].decode("latin-1").lower().split("\r\n")
        status, data = int(fields[0].split(" ")[1]), data[end + 4 :]
        length = next((int(field[15:]) for field in fields if field.startswith("content-length:")), None)
        if status < 200:
            continue
        if (head and not statuses) or status in (204, 304):
            length = 0
        elif "transfer-encoding: chunked" in fields:
            last = data.find(b"0\r\n\r\n")
            if last < 0:
                break
            length = last + 5
        elif length is None:
            if not ended:
                break
            length = len(data)
        if len(data) < length:
            break
        statuses.append(status)
        data = data[length:]
    return statuses


async def ask(port: int, case: HttpCase, within_s: float) -> Outcome:
    """Send the case on a new connection and, once it is answered, NEXT. Silent: the server does not close `within_s`."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head, data, own = case.send.startswith(b"HEAD"), b"", 0
    sending = asyncio.create_task(_send(writer, case))
    try:
        async with asyncio.timeout(within_s):
            while piece := await reader.read(65536):
                data += piece
                if not own and (own := len(answers_in(data, head=head, ended=False))):
                    writer.write(NEXT)
    except ConnectionError:
        pass
    except TimeoutError:
        return Outcome(tuple(answers_in(data, head=head, ended=False)), None, silent=True)
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        writer.transport.abort()
    statuses = answers_in(data, head=head, ended=True)
    if own and len(statuses) > own:
        return Outcome(tuple(statuses[:-1]), statuses[-1])
    return Outcome(tuple(statuses), 0)


async def _send(writer: asyncio.StreamWriter, case: HttpCase) -> None:
    writer.write(case.send)
    await writer.drain()
    if case.want == "cut":
        writer.write_eof()


def fault(case: HttpCase, seen: Outcome) -> str:
    """Return what is wrong with the outcome, or an empty string."""
    good = [status for status in seen.statuses if 200 <= status < 300]
    if 101 in seen.statuses:
        return "another protocol is spoken"
    if len(seen.statuses) > case.answers:
        return "more answers than requests"
    if case.want == "cut":
        return "a request that is not whole is answered" if good else ""
    if seen.silent:
        return "neither answered nor closed"
    if seen.next and seen.next >= 300 and case.answers == 1:
        return "the next request is not understood"
    if case.want in ("accept", "close") and (not good or not 200 <= seen.statuses[0] < 300):
        return "not answered"
    if case.want == "close" and seen.next:
        return "not closed"
    if case.want in ("refuse", "error") and good:
        return "answered"
    if case.want == "refuse" and seen.next:
        return "not closed"
    return ""

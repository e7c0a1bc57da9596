"""`pointsman trace convert`: makes a trace of another trace, of an access log with bodies, or of a file of requests."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from pointsman_common.io.logs import configure_logs
from pointsman_lab.workload.trace_arguments import Format, Trace, trace_errors
from pointsman_lab.workload.trace_files import AUTO, lines_of, read_trace, save_trace
from pointsman_lab.workload.traces import TraceError, TraceRequest

# The format of a line with the text or the token ids of a request, and the fields by which it is known.
REQUESTS = "requests"
_REQUEST_FIELDS = frozenset({"body", "messages", "prompt", "input", "prompt_token_ids"})
# The name that the gateway's code gives to a session without one.
_FOUND = re.compile("s-[0-9a-f]{32}")
# Number of lines by which the format is known. A log may begin with lines that are none of requests.
_LOOKED_AT = 100


def convert(
    trace: Trace,
    out: Annotated[Path, typer.Argument(help="pointsman trace to write; gzip when its name ends with .gz")],
    trace_format: Format = AUTO,
    tokenizers: Annotated[
        list[str] | None,
        typer.Option(help="MODEL=FOLDER or MODEL=HUB_ID for each model of a file of requests; can be repeated"),
    ] = None,
    every_s: Annotated[
        float, typer.Option(min=0, help="interval between the arrivals of requests without a time, in s")
    ] = 1.0,
    output_tokens: Annotated[int, typer.Option(min=1, help="assumed length of an answer of unknown length")] = 200,
) -> None:
    """Make a trace in the pointsman format, with the sessions that were found, of a trace of any known format, an access log with
    bodies, or a file of requests.

    In a file of requests each line is the body of a request of OpenAI's or Anthropic's API (also as in OpenAI's batch files),
    or a line of an access log, whose fields docs/shadow.md lists. Its texts become hashes of tokens.
    """
    configure_logs("trace", "warning")
    with trace_errors("convert"):
        if out.exists() and out.samefile(trace):
            raise TraceError(f"{out}: is the same file as the trace")
        if trace_format == REQUESTS or (trace_format == AUTO and _has_requests(trace)):
            requests = iter(_requests(trace, tokenizers or [], every_s, output_tokens))
        else:
            requests = read_trace(trace, trace_format)
        written = save_trace(out, requests)
    typer.echo(f"{out}: {written} requests")


def _has_requests(path: Path) -> bool:
    """Return whether one of the first lines has a request."""
    for _, line in islice(lines_of(path), _LOOKED_AT):
        try:
            fields = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
        if _REQUEST_FIELDS & fields.keys() and "hash_ids" not in fields:
            return True
    return False


def _requests(path: Path, tokenizers: list[str], every_s: float, output_tokens: int) -> list[TraceRequest]:
    """Return the requests of a log. Raises TraceError if there is none, with the causes."""
    try:
        from pointsman_gateway.io.tokenizer_files import TokenizerNotFound
        from pointsman_shadow.io.logged_requests import FORMATS, LoggedRequests
        from pointsman_shadow.io.request_reader import RequestReader
    except ModuleNotFoundError as missing:
        raise TraceError(f"{path}: to read requests install pointsman[shadow] ({missing.name} is missing)") from None
    sources = dict(entry.partition("=")[::2] for entry in tokenizers)
    if not all(sources.values()):
        raise TraceError("--tokenizers: MODEL=FOLDER or MODEL=HUB_ID is needed")
    try:
        logged = LoggedRequests(path, RequestReader(sources, {}), 0.0, output_tokens, every_s=every_s)
    except TokenizerNotFound as error:
        raise TraceError(f"--tokenizers: {error}") from None

    async def read() -> list[TraceRequest]:
        return [*_by_turns([observed async for observed in logged.read()])]

    found = asyncio.run(read())
    causes = [*logged.causes.lines()]
    if logged.failed:
        causes.append(f"{logged.failed:,} failed")
    if logged.causes.counts["model"]:
        causes.append("give the tokenizer of each model: --tokenizers MODEL=FOLDER")
    if not found:
        told = "\n".join(f"  {cause}" for cause in [*causes, FORMATS])
        raise TraceError(f"{path}: no line has a request that can be used\n{told}")
    for cause in causes:
        typer.echo(f"not converted: {cause}", err=True)
    return found


def _by_turns(requests: list[TraceRequest]) -> Iterator[TraceRequest]:
    """Yield requests in the order of their arrival, with times from that of the first, and turns numbered within each session.
    Sessions that were found by prefixes alone have random names; they get numbers, so that equal files give equal traces."""
    turns: Counter[str] = Counter()
    names: dict[str, str] = {}
    ordered = sorted(requests, key=lambda request: request.timestamp_ms)
    for number, request in enumerate(ordered, 1):
        session = request.session or f"request-{number}"
        if _FOUND.fullmatch(session):
            session = names.setdefault(session, f"found-{len(names) + 1}")
        turns[session] += 1
        yield TraceRequest(
            timestamp_ms=request.timestamp_ms - ordered[0].timestamp_ms,
            session_id=session,
            turn=turns[session],
            input_length=request.input_length,
            output_length=request.output_length,
            hash_ids=request.hash_ids,
            block_size=request.block_size,
        )

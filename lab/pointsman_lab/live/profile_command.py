"""`pointsman profile URL`: measures the step costs of a running vLLM from outside, and writes them to a profile file.

The engine must be idle; measuring stops if other clients use it. Only the prompts remain in its prefix cache, and they are
evicted as any other blocks. Prefill and decode times are the engine's own, from /metrics, and so exclude network and HTTP.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import aiohttp
import typer
from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict
from rich.table import Table

from pointsman_common.io.settings import ARGUMENT
from pointsman_lab.engine.cost_fit import DecodeTime, Fit, FitError, PrefillTime, chunk_size, fit, fit_line
from pointsman_lab.engine.cost_profile import ProfileFile
from pointsman_lab.live.engine_client import EngineClient, EngineError, Metrics, next_stored
from pointsman_lab.report.terminal import make_console, make_table

# Length of the shortest prompt, tokens.
SHORTEST = 64
# Output tokens of a measured decode: one from the prefill and 32 decode steps.
DECODED = 33
# Numbers of sequences that are decoded together.
BATCHES = (1, 2, 4, 8, 16)
# Maximum share of the measuring time that one prefill may take.
LONGEST_SHARE = 1 / 30
# Text whose tokens the prompts are drawn from.
SAMPLE_TEXT = "The signal at the junction was green, and the train took the left track to the harbour while rain fell."


class ProfileSettings(BaseSettings):
    """Settings of one measurement."""

    model_config = SettingsConfigDict(env_prefix="POINTSMAN_PROFILE_")

    url: str = Field(description="base URL of the engine itself, not of a gateway", json_schema_extra=ARGUMENT)
    output: Path = Field(Path("profile.json"), description="file to write the profile to")
    seconds: float = Field(
        120.0, gt=0, description="approximate measuring time, in s; if it is short, long prompts are left out first"
    )
    longest: int = Field(
        0, ge=0, description="longest prompt, in tokens; 0: the engine's limit, at most half of its KV cache"
    )
    max_num_batched_tokens: int = Field(
        0, ge=0, description="maximum tokens per step, used if the engine's KV events do not show it; 0: unknown"
    )
    repeats: int = Field(
        5, ge=1, description="repetitions of each measurement, as far as time allows; their median is used"
    )
    pause_s: float = Field(
        0.3, ge=0, description="idle time before each measured prefill, in s, as before a request that comes alone"
    )
    timeout_s: float = Field(600.0, gt=0, description="timeout of one request, in s")
    api_key: SecretStr = Field(SecretStr(""), description="API key, sent as bearer token; default: none")


@dataclass
class Measurements:
    """Results of measuring engines."""

    engine: dict[str, int] = field(default_factory=dict)  # fields of EngineConfig; of several engines, what all meet
    prefills: list[PrefillTime] = field(default_factory=list)  # medians of repetitions; empty: not measured
    decodes: list[DecodeTime] = field(default_factory=list)  # the same, by batch and length
    frontend_s: tuple[float, float] = (0.0, 0.0)  # seconds of the front end per request and per prompt token
    # Decode steps of single sequences whose tokens were streamed through a gateway; empty without a gateway.
    streamed_decodes: list[DecodeTime] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)  # sentences about what could not be measured


def run(settings: ProfileSettings) -> None:
    """Measure, print the fit and write the profile. Exits with 2 if the engine cannot be measured, with 130 on Ctrl-C."""
    console, url = make_console(), settings.url
    console.print(f"measuring {url}, which must be idle, for about {settings.seconds:g} s", highlight=False)
    try:
        measured = asyncio.run(measure(settings))
        found = fit([*measured.prefills, *measured.decodes])
    except (EngineError, FitError) as error:
        typer.echo(f"pointsman profile: {error}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    console.print(table_of(found))
    for remark in measured.remarks:
        console.print(remark, highlight=False)
    file = profile_of(url, measured, found)
    settings.output.write_bytes(file.encode())
    console.print(f"{settings.output}: profile {found.profile.name}, residual {found.residual:.1%}", highlight=False)


def profile_of(url: str, measured: Measurements, found: Fit) -> ProfileFile:
    """Return the profile file of a fit and its measurements."""
    about = {
        "url": url,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "residual": round(found.residual, 4),
        "front_end_s": {"request": round(measured.frontend_s[0], 6), "prompt_token": round(measured.frontend_s[1], 9)},
        "not_measured": "transfer_s, transfer_token_s and layerwise_tail_s need two engines; they are the reference's",
    }
    return ProfileFile(costs=found.profile, engine=measured.engine, about=about)


def table_of(found: Fit) -> Table:
    """Return a table of measured and fitted times, side by side."""
    table = make_table("measured", "ms", "fitted ms", "error")
    for measurement, fitted in found.rows:
        table.add_row(
            str(measurement),
            f"{measurement.seconds * 1e3:,.2f}",
            f"{fitted * 1e3:,.2f}",
            f"{fitted / measurement.seconds - 1:+.1%}",
        )
    return table


async def measure(settings: ProfileSettings, chunk: int = 0) -> Measurements:
    """Measure an engine. `chunk`: its max_num_batched_tokens, 0 if unknown. Raises EngineError, EngineBusyError."""
    key = settings.api_key.get_secret_value()
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=settings.timeout_s),
        headers={"Authorization": f"Bearer {key}"} if key else None,
    ) as http:
        return await _MeasuringRun(EngineClient(settings.url, http), settings).run(chunk)


@dataclass(frozen=True)
class _Prefill:
    """One measured prefill. Its number of steps follows from max_num_batched_tokens, which is found later."""

    new: int
    cached: int
    seconds: float


class _MeasuringRun:
    def __init__(self, client: EngineClient, settings: ProfileSettings) -> None:
        self._client = client
        self._settings = settings
        self._found = Measurements()
        # Random prompts share no prefix, so that only the intended tokens are cached.
        self._rng = random.Random(uuid.uuid4().int)
        self._words: list[int] = []
        self._front: list[tuple[float, float]] = []
        # Requested (new, cached) tokens -> its measured prefills; requested (batch, context) -> its measured decodes.
        self._prefills: dict[tuple[int, int], list[_Prefill]] = {}
        self._decodes: dict[tuple[int, int], list[DecodeTime]] = {}
        self._ends_at = time.monotonic() + settings.seconds

    async def run(self, chunk: int) -> Measurements:
        client, found = self._client, self._found
        metrics = await client.connect()
        block_size, blocks = (int(metrics.cache.get(name, 0)) for name in ("block_size", "num_gpu_blocks"))
        if not block_size or blocks < 2:
            raise EngineError(f"{client.url}/metrics lacks block_size or num_gpu_blocks")
        # vLLM's count includes one block that it never fills.
        found.engine = {"block_size": block_size, "kv_blocks": blocks - 1, "max_model_len": client.max_model_len}
        self._words = sorted(set(await client.tokens_of(SAMPLE_TEXT)))
        limit = min(client.max_model_len - DECODED - 1, (blocks - 1) * block_size // 2)
        limit = min(limit, self._settings.longest or limit)
        if limit < 4 * SHORTEST or not self._words:
            raise EngineError(f"prompts of up to {limit} tokens are too short to measure with")
        # The first requests of a process are slower than any later one.
        for _ in range(2):
            await client.complete(self._prompt(SHORTEST), 2, self._salt())
        longest = await self._first_round(limit)
        await self._other_rounds()
        chunk = chunk or await self._chunk(longest) or self._settings.max_num_batched_tokens
        if chunk:
            found.engine["max_num_batched_tokens"] = chunk
        else:
            found.remarks.append("max_num_batched_tokens is unknown: each prefill is counted as one step")
        found.prefills = [
            PrefillTime(measurement.new, measurement.cached, chunk or measurement.new, measurement.seconds)
            for measurement in map(median_measurement, self._prefills.values())
        ]
        found.decodes = [median_measurement(seen) for seen in self._decodes.values()]
        found.frontend_s = fit_line(self._front)
        return found

    async def _first_round(self, limit: int) -> int:
        """Choose the measurements and take each once; return the length of the longest prompt."""
        longest = await self._cold(limit)
        half, quarter = longest // 2, longest // 4
        # Few new tokens after many cached ones, as in the turns of a session, and about equal numbers of both.
        short_pairs = ((SHORTEST, longest - SHORTEST), (SHORTEST, half), (2 * SHORTEST, half))
        for new, cached in (*short_pairs, (quarter, half), (half, quarter)):
            await self._prefill(new, cached)
        await self._decode(longest)
        return longest

    async def _other_rounds(self) -> None:
        """Repeat all measurements, round by round, so that a long stall does not affect all repetitions of one measurement."""
        for number in range(1, self._settings.repeats):
            if time.monotonic() > self._ends_at:
                self._found.remarks.append(f"there was time to take each measurement {number} times")
                return
            for new, cached in self._prefills:
                await self._prefill(new, cached)
            for batch, context in self._decodes:
                await self._one_decode(batch, context)

    def _prompt(self, length: int) -> list[int]:
        return self._rng.choices(self._words, k=length)

    def _salt(self) -> str:
        return f"pointsman-profile-{self._rng.getrandbits(64):x}"

    async def _cold(self, limit: int) -> int:
        """Measure cold prompts of doubled lengths, up to `limit` or until one would take too long; return the longest length."""
        length = SHORTEST
        while True:
            seconds = await self._prefill(length, 0)
            longer = min(2 * length, limit)
            if longer == length:
                return length
            if (longer / length) ** 2 * seconds > self._settings.seconds * LONGEST_SHARE and length >= 4 * SHORTEST:
                self._found.remarks.append(f"prompts of more than {length} tokens would have taken too long")
                return length
            length = longer

    async def _prefill(self, new: int, cached: int) -> float:
        """Measure the prefill of `new` tokens after `cached` ones; return its duration in s."""
        client, salt, prompt = self._client, self._salt(), self._prompt(cached + new)
        if cached:
            await client.complete(prompt[: cached + 1], 1, salt)
        before = await self._quiet()
        await asyncio.sleep(self._settings.pause_s)
        took_s = await client.complete(prompt, 1, salt)
        after = await client.wait_until_counted(before, 1)
        hit = round(after.since(before, "vllm:prefix_cache_hits_total"))
        seconds = after.since(before, "vllm:request_prefill_time_seconds_sum")
        self._front.append((float(len(prompt)), took_s - seconds))
        self._prefills.setdefault((new, cached), []).append(_Prefill(len(prompt) - hit, hit, seconds))
        return seconds

    async def _chunk(self, longest: int) -> int | None:
        """Return max_num_batched_tokens, from the blocks that each step of the longest prompt stores; None if it is not found."""
        block_size = self._found.engine["block_size"]
        async with self._client.stored() as queue:
            # Events published before the engine has the subscription are lost, so send requests until an event arrives.
            for _ in range(3):
                await self._client.complete(self._prompt(2 * block_size), 1, self._salt())
                if await next_stored(queue) is not None:
                    break
            else:
                return None
            while await next_stored(queue) is not None:
                pass
            before = await self._quiet()
            await self._client.complete(self._prompt(longest), 1, self._salt())
            await self._client.wait_until_counted(before, 1)
            steps = []
            while (blocks := await next_stored(queue)) is not None:
                steps.append(blocks)
        return chunk_size(steps, block_size)

    async def _decode(self, longest: int) -> None:
        capacity = self._found.engine["kv_blocks"] * self._found.engine["block_size"]
        for context in (SHORTEST, longest // 4, longest):
            for batch in BATCHES:
                if batch > 1 and batch * (context + DECODED) > capacity // 2:
                    continue
                # The fit needs several batches at one context and several contexts at one batch.
                if time.monotonic() > self._ends_at and batch > 2:
                    self._found.remarks.append(f"no time was left for a decode of {batch} over {context} each")
                    continue
                await self._one_decode(batch, context)

    async def _one_decode(self, batch: int, context: int) -> None:
        client, salt, prompt = self._client, self._salt(), self._prompt(context)
        # All sequences share one cached prompt, so that they begin to decode almost together.
        await client.complete(prompt, 1, salt)
        before = await self._quiet()
        await asyncio.gather(*(client.complete(prompt, DECODED, salt) for _ in range(batch)))
        after = await client.wait_until_counted(before, batch)
        seconds = after.since(before, "vllm:request_decode_time_seconds_sum") / batch / (DECODED - 1)
        seen = DecodeTime(batch, batch * (context + (DECODED - 1) / 2), seconds)
        self._decodes.setdefault((batch, context), []).append(seen)

    async def _quiet(self) -> Metrics:
        metrics = await self._client.metrics()
        self._client.check_idle(metrics)
        return metrics


_Seen = TypeVar("_Seen", _Prefill, DecodeTime)


def median_measurement(seen: Sequence[_Seen]) -> _Seen:
    """Return the measurement with the median duration. The minimum would not be typical of what requests see."""
    return sorted(seen, key=lambda measurement: measurement.seconds)[len(seen) // 2]

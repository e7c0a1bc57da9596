"""An emulated vLLM server: vLLM's HTTP API, metrics and KV events over the engine model. It runs on a laptop."""

from __future__ import annotations

import asyncio
import signal
import ssl
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import structlog
from aiohttp import web
from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from pointsman_common.core.addresses import Address
from pointsman_common.io.listen_errors import listening
from pointsman_common.io.listening import bound_socket
from pointsman_common.io.logs import configure_logs
from pointsman_lab.emulator.engine_loop import EngineLoop
from pointsman_lab.emulator.http_routes import EngineApp
from pointsman_lab.emulator.illness import Illness
from pointsman_lab.emulator.kv_event_publisher import KVEventPublisher, to_wire
from pointsman_lab.emulator.mooncake_connector import KvTransfers
from pointsman_lab.emulator.scripted_answers import parse_script
from pointsman_lab.emulator.suspension import Suspension
from pointsman_lab.emulator.vllm_metrics import EngineMetrics
from pointsman_lab.engine.cost_profile import Profile, read_profile
from pointsman_lab.engine.interface import EngineConfig
from pointsman_lab.engine.model import EngineModel
from pointsman_lab.workload.tokenizer import TOKENIZER_DIR, ChatTokenizer

log = structlog.get_logger()


class EmulateSettings(BaseSettings):
    """Settings of one emulated engine. Names follow vLLM's flags where there is one."""

    model_config = SettingsConfigDict(env_prefix="POINTSMAN_EMULATE_")

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="HTTP port; 0 picks a free one, printed on stdout")
    kv_events_port: int = Field(0, ge=0, le=65535, description="ZMQ port of KV events; 0 picks a free one")
    replay_port: int = Field(0, ge=0, le=65535, description="ZMQ port of the KV event replay; 0 picks a free one")
    ssl_certfile: Path | None = Field(None, description="certificate chain (PEM): HTTPS instead of HTTP")
    ssl_keyfile: Path | None = Field(None, description="private key of ssl_certfile (PEM)")
    api_key: SecretStr = Field(SecretStr(""), description="API key that clients must send; empty: none")
    model: str = Field("pointsman-emulated", min_length=1, description="served model name")
    root: str = Field("", description="path or hub id of its weights; empty: the tokenizer's folder")
    dtype: str = Field(
        "", description="type of its weights that it announces, such as bfloat16; empty: none, as a plain vLLM"
    )
    tokenizer: Path = Field(TOKENIZER_DIR, description="folder with tokenizer.json and tokenizer_config.json")
    block_size: int = Field(16, description="tokens per KV block, a multiple of 16")
    kv_blocks: int = Field(20_000, ge=1, description="number of usable KV blocks; vLLM's num_gpu_blocks is one more")
    host_tier: float = Field(0.0, ge=0, description="size of the host tier, as a multiple of kv_blocks; 0: none")
    max_model_len: int = Field(131_072, ge=2, description="maximum tokens of prompt and answer together")
    max_num_batched_tokens: int = Field(8_192, ge=1, description="maximum tokens per step")
    max_num_seqs: int = Field(256, ge=1, description="maximum number of running requests")
    long_prefill_token_threshold: int = Field(
        0, ge=0, description="maximum prefill tokens of one request per step; 0: unlimited"
    )
    long_prefill_token_threshold_adaptive: bool = Field(
        False, description="raise the threshold to at least a request's equal share of a step"
    )
    scheduling_policy: Literal["fcfs", "priority"] = Field("fcfs", description="order by arrival, or by priority first")
    watermark: float = Field(0.0, ge=0, lt=1, description="share of KV blocks that admission leaves free")
    layerwise: bool = Field(False, description="push KV layer by layer while it is computed")
    profile: Path | None = Field(None, description="cost profile: a file of `pointsman profile`, or reference or slow")
    speedup: float = Field(1.0, gt=0, description="factor by which it is faster than the modelled engine")
    seed: int = Field(0, ge=0, description="seed of the answers; equal seeds answer equal prompts equally")
    hash_seed: int = Field(0, ge=0, description="seed of the block hashes; other seeds give other hashes")
    script: Path | None = Field(None, description="file of scripted answers, with tool calls, for chats with tools")
    log_level: str = Field("info", description="debug, info, warning or error")

    def engine_config(self, tokenizer: ChatTokenizer) -> EngineConfig:
        """Return the model's configuration. Raises ValueError for settings that vLLM would not start with."""
        return EngineConfig(
            block_size=self.block_size,
            kv_blocks=self.kv_blocks,
            host_blocks=int(self.host_tier * self.kv_blocks),
            max_model_len=self.max_model_len,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            long_prefill_token_threshold_adaptive=self.long_prefill_token_threshold_adaptive,
            scheduling_policy=self.scheduling_policy,
            watermark=self.watermark,
            vocabulary=tokenizer.word_ids,
            eos_token_id=tokenizer.eos_token_id,
            seed=self.seed,
            hash_seed=self.hash_seed,
        )


@dataclass
class EmulatedEngine:
    """A running emulated engine. `model` may be read, but must not be changed."""

    url: str  # base URL with the real port; 127.0.0.1 or ::1 if it listens on all interfaces
    model: EngineModel
    kv_endpoint: str  # ZMQ address of the KV events as vLLM reports it: with * for all IPv4 interfaces
    replay_endpoint: str  # of their replay, in the same form
    _runner: web.AppRunner
    _publisher: KVEventPublisher
    _loop_task: asyncio.Task[None]

    async def stop(self) -> None:
        """Stop the engine as if it were killed: open streams break, and nothing more is published."""
        self._loop_task.cancel()
        try:
            await asyncio.gather(self._loop_task, return_exceptions=True)
            await self._runner.cleanup()
        finally:
            await self._publisher.stop()

    async def wait(self) -> None:
        """Wait until the engine's loop ends, which happens only by an error; raises that error."""
        await asyncio.shield(self._loop_task)


async def start(settings: EmulateSettings, profile: Profile | None = None) -> EmulatedEngine:
    """Start an emulated engine in this process. `profile` takes precedence over the settings' profile. Raises ValueError for
    invalid settings, and OSError for a port in use or a file that cannot be read."""
    if settings.profile is not None:
        file = read_profile(settings.profile)
        profile = profile or file.costs
        # Engine settings that were measured apply unless they are set explicitly.
        known = {name: value for name, value in file.engine.items() if name not in settings.model_fields_set}
        settings = settings.model_copy(update=known)
    script = parse_script(settings.script.read_bytes()) if settings.script is not None else []
    tokenizer = ChatTokenizer(settings.tokenizer)
    model = EngineModel(settings.engine_config(tokenizer), profile)
    started_at = time.time()
    metrics = EngineMetrics(model, settings.model, started_at, {"dtype": settings.dtype, "kv_dtype": settings.dtype})
    publisher = KVEventPublisher(settings.host, settings.kv_events_port, settings.replay_port)

    def publish(events: Sequence[object]) -> None:
        if wire := to_wire(events, settings.block_size):
            publisher.publish(time.time(), wire)

    loop = EngineLoop(model, metrics, settings.speedup, publish)
    transfers = KvTransfers(uuid.uuid4().hex, model.profile, settings.speedup, layerwise=settings.layerwise)
    suspension = Suspension(model, loop)
    metrics.suspension = suspension.metrics
    app = EngineApp(
        settings.model,
        int(started_at),
        tokenizer,
        model,
        loop,
        metrics,
        publisher.source,
        transfers,
        suspension,
        settings.api_key.get_secret_value(),
        script,
        settings.root,
    ).make()
    Illness(loop).add_to(app)
    tls = None
    if settings.ssl_certfile is not None:
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile)
    # Without handler_cancellation, a request whose client has disconnected would keep its blocks until its last token.
    # A stopped engine breaks its streams at once. In aiohttp a timeout of 0 means to wait for them without limit.
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.01)
    try:
        await runner.setup()
        own = Address(settings.host, settings.port)
        with listening(settings, "port", str(own)):
            site = web.SockSite(runner, bound_socket(own), ssl_context=tls)
        await site.start()
    except BaseException:
        await runner.cleanup()
        await publisher.stop()
        raise
    port = runner.addresses[0][1]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)
    transfers.address = str(Address(host, port))
    task = asyncio.get_running_loop().create_task(loop.run())
    url = f"http{'s' if tls else ''}://{transfers.address}"
    return EmulatedEngine(url, model, publisher.endpoint, publisher.replay_endpoint, runner, publisher, task)


def run(settings: EmulateSettings) -> None:
    """Serve until SIGTERM or SIGINT. Prints one line with the URL to stdout when it is ready."""
    configure_logs("emulate", settings.log_level)
    try:
        asyncio.run(_serve(settings))
    except OSError as error:
        raise SystemExit(f"pointsman emulate: {error}") from None


async def _serve(settings: EmulateSettings) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    engine = await start(settings)
    print(f"emulated engine {engine.url}", flush=True)
    log.info(
        "emulated engine started",
        listen=str(Address(settings.host, int(engine.url.rpartition(":")[2]))),
        url=engine.url,
        kv_events=engine.kv_endpoint,
        replay=engine.replay_endpoint,
        model=settings.model,
    )
    stopping = asyncio.create_task(stop.wait())
    failing = asyncio.create_task(engine.wait())
    await asyncio.wait({stopping, failing}, return_when=asyncio.FIRST_COMPLETED)
    try:
        if failing.done():
            failing.result()
    finally:
        for task in (stopping, failing):
            task.cancel()
        await asyncio.gather(stopping, failing, return_exceptions=True)
        await engine.stop()

"""Requests as a gateway understands them: the same parsing, templates, tokens, keys and sessions, and nothing sent anywhere."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping

import structlog

from pointsman.router.v1 import placement_pb2
from services.gateway.auth import DEFAULT_TENANT
from services.gateway.dialects import DialectError, Kind, Rules, parse
from services.gateway.http.message import Headers, Request
from services.gateway.limits import NO_LIMITS, Grant
from services.gateway.pools import Exactness, PoolState
from services.gateway.telemetry import Telemetry
from services.gateway.token_cache import TokenCache
from services.gateway.tokens import ModelTokenizer, locate
from services.gateway.understand import Understanding
from services.shadow.book import Asked

log = structlog.get_logger()

TOKEN_CACHE_BYTES = 128 << 20


class NotUnderstood(Exception):
    """A request that cannot be compared; `reason` is one of a few words, for a metric's label."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Reader:
    """Understands requests for the models that it is told of."""

    def __init__(self, tokenizers: Mapping[str, str], aliases: Mapping[str, str]) -> None:
        """Tokenizers (model -> path or hub id) are read now. Raises TokenizerMissing."""
        self._cache = TokenCache(TOKEN_CACHE_BYTES)
        self._understanding = Understanding(Telemetry(self._cache), self._cache)
        # An engine takes a client's own cache salt, where no gateway of ours has taken it out.
        self._rules = Rules(aliases, client_cache_salt=True)
        # By any name: the model, and the LoRA adapter that the name means.
        self._known: dict[str, tuple[PoolState, str]] = {}
        for model, source in tokenizers.items():
            self.learn(model, source)

    def learn(
        self, model: str, source: str, served_names: tuple[str, ...] = (), lora_names: tuple[str, ...] = ()
    ) -> None:
        """A model there is, by these other names, too, and with these adapters. Raises TokenizerMissing. Mutates."""
        self._add(model, ModelTokenizer.load(locate(source), self._cache), served_names, lora_names)

    def learn_without_tokens(self, model: str, served_names: tuple[str, ...], why: str) -> None:
        """A model whose requests have no keys. Mutates."""
        log.warning("no tokens of a model: its requests share nothing", model=model, reason=why)
        self._add(model, None, served_names, ())

    def _add(
        self, model: str, tokenizer: ModelTokenizer | None, names: tuple[str, ...], lora_names: tuple[str, ...]
    ) -> None:
        exactness = Exactness.INEXACT if tokenizer is None else Exactness.EXACT
        state = PoolState(placement_pb2.Pool(model=model), tokenizer, "", exactness)
        self._known |= {name: (state, name) for name in lora_names}
        self._known |= dict.fromkeys((model, *names), (state, ""))

    def knows(self, model: str) -> bool:
        """Whether requests for it are understood."""
        return model in self._known

    async def read(
        self, path: str, headers: Headers, body: bytes, at: float
    ) -> tuple[Asked, placement_pb2.PlacementRequest]:
        """A request that came `at` (unix s), and what a gateway would ask a router about it. Raises NotUnderstood."""
        try:
            kind = Kind(path)
        except ValueError:
            raise NotUnderstood("path", f"{path} is none of an engine's") from None
        if not kind.generates:
            raise NotUnderstood("path", f"{path} reads no prefix cache")
        try:
            call = parse(kind, body, self._rules)
        except DialectError as error:
            raise NotUnderstood("invalid", str(error)) from None
        found = self._known.get(call.model)
        if found is None:
            raise NotUnderstood("model", f"nothing is known of {call.model!r}")
        state, lora = found
        request = Request("POST", path, "", headers, outgoing=None, body=b"")  # type: ignore[arg-type]
        try:
            job = await self._understanding.job(
                request, call, state, lora, DEFAULT_TENANT, Grant(None, NO_LIMITS), time.monotonic(), dry=False
            )
        except DialectError as error:
            raise NotUnderstood("invalid", str(error)) from None
        placement = job.placement
        asked = Asked(
            request_id=headers.get("X-Request-ID") or secrets.token_hex(16),
            at=at,
            model=state.pool.model,
            session=placement.session_id,
            input_tokens=placement.input_tokens,
            keys=tuple(placement.keys),
            max_output_tokens=placement.max_output_tokens,
        )
        return asked, placement

"""A model's tokenizer as the engine applies it: tokenizer.json, special tokens and chat template from the model's files."""

from __future__ import annotations

import contextlib
import sys
from array import array
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import structlog
from tokenizers import Tokenizer

from pointsman_gateway.core.api import ApiCall, Endpoint
from pointsman_gateway.core.api.anthropic_messages import DISABLED, disabled_effort, merged_system
from pointsman_gateway.core.api.prompt_length import check_tokens
from pointsman_gateway.core.api.sequences import prompts_of
from pointsman_gateway.core.tokens import tokenizer_probes
from pointsman_gateway.core.tokens.chat_template import ChatTemplate, Rendered, common_prefix
from pointsman_gateway.core.tokens.encoders import FastEncoder, FastEncoderError, LibraryEncoder, fast_encoder_for
from pointsman_gateway.core.tokens.render_budget import OverBudget, Unrenderable, light_limits, thread_limits
from pointsman_gateway.core.tokens.split_points import SplitPoints, split_points_for
from pointsman_gateway.core.tokens.token_cache import TokenCache, TokenIds

log = structlog.get_logger()

# Maximum number of characters, and of tokens, of a text by which the encoders are compared. What `tokenizers` returns is read,
# and freed, with the interpreter lock: for so many that takes some 3 ms.
_COMPARED = 1 << 16
# Memory of a token's id while a prompt is tokenised: it is in a piece's ids and in the prompt's.
_TOKEN_BYTES = 8
# Number of drawn texts by which `fastokens` is compared while a tokenizer is loaded. They take 0.1 to 0.2 s.
_PROVED_AT_LOAD = 200
_NONE: TokenIds = array("I")


@dataclass(frozen=True)
class Prompt:
    """Token ids of a request's prompt (the first of several), and the number of tokens of each of its prompts.

    A prompt with media has only the tokens before the first media part; `media` is that part's content. A prompt that is too long
    may have only enough tokens to show that. `steady`: another instance renders the same prompt, even some minutes earlier or
    later. `common`: number of tokens that all of several prompts begin with.
    """

    ids: TokenIds  # of the first prompt, up to its first media part
    lengths: tuple[int, ...]  # tokens of each prompt, in order; none after one that is too long
    media: bytes = b""
    steady: bool = True
    common: int = 0


@dataclass
class _Text:
    """One text: its pieces, and the special tokens around them. `around` is None if only the `tokenizers` library can place the
    special tokens; the text is then one piece."""

    pieces: list[str]
    around: tuple[TokenIds, TokenIds] | None


class PendingPrompt:
    """A prompt that is not tokenised yet. `longest`: number of characters of its longest piece."""

    def __init__(
        self,
        tokenizer: ModelTokenizer,
        prompts: Sequence[_Text | TokenIds],
        most_tokens: int,
        room: int = sys.maxsize,
        *,
        media: bytes = b"",
        steady: bool = True,
    ) -> None:
        """`most_tokens`: number of tokens beyond which tokenising may stop; 0: no limit. `room`: number for which there is
        memory. Raises Unrenderable if a piece is too long to be encoded."""
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._most_tokens, self._room = most_tokens, room
        self._media = media
        self._steady = steady
        texts = [prompt for prompt in prompts if isinstance(prompt, _Text)]
        lengths = [len(piece) for text in texts for piece in text.pieces]
        self.longest = max(lengths, default=0)
        self._inline = sum(lengths) <= tokenizer.encoder.inline_chars
        if self.longest > tokenizer.encoder.most_chars:
            raise Unrenderable(f"{self.longest} characters without a place to cut them")

    async def tokenize_by(self, run_in_thread: Callable[[Callable[[], Prompt]], Awaitable[Prompt]]) -> Prompt:
        """Return tokenize(), run at once if it takes about a millisecond, else in a thread. Raises Unrenderable."""
        return self.tokenize() if self._inline else await run_in_thread(self.tokenize)

    def tokenize(self) -> Prompt:
        """Return the tokenised prompt. Raises Unrenderable. May run in any thread, and releases the interpreter lock for long
        texts."""
        every: list[TokenIds] = []
        most = min(self._most_tokens or self._room, self._room)
        for prompt in self._prompts:
            every.append(self._tokenizer.tokens(prompt, most) if isinstance(prompt, _Text) else prompt)
            if self._room < len(every[-1]) <= (self._most_tokens or sys.maxsize):
                raise Unrenderable("more tokens than there is memory for")
            if self._most_tokens and len(every[-1]) > self._most_tokens:
                break
        # What all begin with is what the first and the last one in lexicographic order do.
        common = common_prefix(min(every), max(every)) if len(every) > 1 else 0
        return Prompt(every[0], tuple(map(len, every)), self._media, self._steady, common)


class ModelTokenizer:
    """Tokenizer and chat template of one model. Safe to use from several threads.

    `encoder` is `fastokens` if it has proved to give the tokens of `tokenizers`, and `tokenizers` from the first difference on.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        tool_template: ChatTemplate | None,
        merges_system: bool = False,
        cache: TokenCache | None = None,
    ) -> None:
        """`tool_template`: the template for requests with tools; None: `template`. `merges_system`: the engine moves an Anthropic
        request's late system messages to the front."""
        cache = cache or TokenCache(0)
        self._library = LibraryEncoder(tokenizer, cache)
        self._tokenizer = tokenizer
        self._template = template
        self._tool_template = tool_template or template
        self._merges_system = merges_system
        self._max_token_chars = max(map(len, tokenizer.get_vocab(with_added_tokens=True)), default=1)
        self.encoder: LibraryEncoder | FastEncoder = self._library
        self._around = self._special_tokens_around()
        rendered = self._rendered_probes()
        self.split_points = self._tried(split_points_for(tokenizer, rendered), rendered)
        # A piece of a prompt that was encoded not long ago, for a comparison; "" if none is wanted.
        self._seen: str | None = ""
        if (fast := fast_encoder_for(tokenizer, cache)) is not None:
            self.encoder = fast
            texts = tokenizer_probes.drawn_texts(self.added_tokens(), _PROVED_AT_LOAD)
            self.prove([*tokenizer_probes.TEXTS, *rendered, *texts])
        if not self.is_fast:
            self._library.join_cache()

    @property
    def is_fast(self) -> bool:
        """Whether `fastokens` encodes."""
        return self.encoder is not self._library

    def added_tokens(self) -> list[str]:
        """Return the texts of the added tokens."""
        return [token.content for token in self._tokenizer.get_added_tokens_decoder().values()]

    def prove(self, texts: Iterable[str]) -> bool:
        """Compare the tokens of `texts` by `fastokens` with those of `tokenizers`, which is used from the first difference on.
        Return whether there is none. May run in any thread.

        A text of very many tokens is left out: reading those of `tokenizers` would block the event loop.
        """
        for text in texts:
            fast = self.encoder
            if not isinstance(fast, FastEncoder):
                return False
            try:
                ids = fast.encode(text, counted=False)
            except FastEncoderError as error:
                self._switch_back(str(error))
                return False
            if len(ids) <= _COMPARED and ids != self.whole(text):
                self._switch_back(f"other tokens for a text of {len(text)} characters")
                return False
        return True

    def prove_by_prompt(self) -> bool:
        """As prove(), with a piece of a prompt since the last call, if there was one that is not too long."""
        seen, self._seen = self._seen, None
        return self.prove([seen] if seen else [])

    def _switch_back(self, reason: str) -> None:
        """Encode with `tokenizers` from now on. Mutates."""
        if self.is_fast:
            self.encoder = self._library
            self._library.join_cache()
            log.error("fastokens is used no longer, and tokenizers encodes", reason=reason)

    def prepare(self, call: ApiCall, context: int = 0, *, light: bool = False) -> PendingPrompt:
        """Return `call`'s prompt as the engine will see it: rendered, and cut into pieces. `context`: maximum
        number of tokens that are of use (0: unknown). `light`: within the limits of the event loop. Raises Unrenderable if the
        prompt cannot be rendered outside the engine (OverBudget: or not within the limits), ContextExceeded if it has too many
        characters for `context`, and ApiRequestError."""
        if call.untokenizable:
            raise Unrenderable(call.untokenizable)
        if call.chat is not None:
            chat = self._anthropic(call.chat) if call.endpoint is Endpoint.MESSAGES else call.chat
            most = context * self._max_token_chars
            limits = (light_limits if light else thread_limits)(most, len(call.payload), call.decoded_bytes)
            try:
                rendered = self._template_for(chat).read(chat, limits)
            except OverBudget as over:
                self._check_chars(call.endpoint, over.characters, context)
                raise
            text = self._of_chat(rendered, add_special_tokens=chat.get("add_special_tokens") is True)
            room = max(limits.memory - len(rendered.text), 0) // _TOKEN_BYTES
            return PendingPrompt(self, [text], context, room, media=rendered.media, steady=rendered.steady)
        add = call.body.get("add_special_tokens") is not False
        prompts: list[_Text | TokenIds] = []
        for prompt in prompts_of(call.body):
            if isinstance(prompt, str):
                self._check_chars(call.endpoint, len(prompt), context)
                prompts.append(self._text(prompt, add_special_tokens=add))
            else:
                prompts.append(array("I", prompt))
        return PendingPrompt(self, prompts, context)

    def _check_chars(self, endpoint: Endpoint, characters: int, context: int) -> None:
        """Raises ContextExceeded if a text has more characters than `context` tokens can have, as vLLM does (renderers/params.py,
        `_text_len_check`)."""
        if context and characters > context * self._max_token_chars:
            check_tokens(endpoint, -(-characters // self._max_token_chars), context)

    def prompt(self, call: ApiCall) -> Prompt:
        """Return prepare(call).tokenize()."""
        return self.prepare(call).tokenize()

    def _anthropic(self, chat: dict[str, Any]) -> dict[str, Any]:
        """Return a converted chat with vLLM's changes that depend on the template."""
        if self._merges_system:
            chat = merged_system(chat)
        if chat.get("reasoning_effort") == DISABLED:
            chat = {**chat, "reasoning_effort": self._disabled_effort}
        return chat

    @cached_property
    def _disabled_effort(self) -> str:
        def render(chat: dict[str, Any]) -> str | None:
            try:
                return self._template.render(chat) if self._template is not None else None
            except Unrenderable:
                return None

        return disabled_effort(render)

    def chat(self, body: dict[str, Any]) -> list[int]:
        """Return the token ids of a chat completions body without media. Raises Unrenderable."""
        text = self._template_for(body).render(body)
        return self.text(text, add_special_tokens=body.get("add_special_tokens") is True)

    def text(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of plain text. Raises Unrenderable."""
        return self.tokens(self._text(text, add_special_tokens=add_special_tokens)).tolist()

    def tokens(self, text: _Text, most: int = 0) -> TokenIds:
        """Return the tokens of `text`. If there are more than `most` tokens (0: no limit), possibly only some of them, but more
        than `most`. Raises Unrenderable."""
        if text.around is None:
            return self._library.encode_anew(text.pieces[0], add_special_tokens=True)
        before, after = text.around
        all_ids = before[:]
        for piece in text.pieces:
            all_ids += self._encode(piece)
            if most and len(all_ids) > most:
                return all_ids
        return all_ids + after

    def whole(self, text: str) -> TokenIds:
        """Return the token ids of plain text without special tokens, tokenised as a whole: the reference for all other ways."""
        return self._library.encode_anew(text)

    def decode(self, ids: TokenIds, *, special: bool = True) -> str:
        """Return the text of these tokens, with or without special tokens."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=not special)
        return text

    def _encode(self, piece: str) -> TokenIds:
        if self._seen is None and len(piece) <= _COMPARED:
            self._seen = piece
        try:
            return self.encoder.encode(piece)
        except FastEncoderError as error:
            self._switch_back(str(error))
            return self._encode(piece)

    def _template_for(self, body: dict[str, Any]) -> ChatTemplate:
        template = self._tool_template if body.get("tools") is not None else self._template
        if template is None:
            raise Unrenderable("the model has no chat template")
        return template

    def _of_chat(self, rendered: Rendered, *, add_special_tokens: bool) -> _Text:
        """Return a chat's text; of a prompt with media the part whose tokens are known. `add_special_tokens`: put the special
        tokens around it, or before the part; otherwise it has only those that the template writes."""
        if not rendered.media:
            return self._text(rendered.text, add_special_tokens=add_special_tokens)
        if add_special_tokens and self._around is None:
            raise Unrenderable("special tokens around a prompt with media")
        before = self._around[0] if add_special_tokens and self._around else _NONE
        return self._in_pieces(self.split_points.head(rendered.text, rendered.known), (before, _NONE))

    def _text(self, text: str, *, add_special_tokens: bool) -> _Text:
        around = self._around if add_special_tokens else (_NONE, _NONE)
        return _Text([text], None) if around is None else self._in_pieces(text, around)

    def _in_pieces(self, text: str, around: tuple[TokenIds, TokenIds]) -> _Text:
        return _Text(self.split_points.pieces(text, self.encoder.least_chars), around)

    def _special_tokens_around(self) -> tuple[TokenIds, TokenIds] | None:
        """Return the special tokens that add_special_tokens puts before and after any text; None if it works in another way."""
        around = []
        for text in ("points", "7 tracks"):
            inner, outer = self.whole(text), self._library.encode_anew(text, add_special_tokens=True)
            places = [at for at in range(len(outer)) if inner and outer[at : at + len(inner)] == inner]
            if len(places) != 1:
                return None
            around.append((outer[: places[0]], outer[places[0] + len(inner) :]))
        return around[0] if around[0] == around[1] else None

    def _rendered_probes(self) -> list[str]:
        if self._template is None:
            return []
        rendered = []
        for probe in tokenizer_probes.CHATS:
            with contextlib.suppress(Unrenderable):
                rendered.append(self._template.render(probe))
        return rendered

    def _tried(self, cuts: SplitPoints, rendered: list[str]) -> SplitPoints:
        """Return `cuts` if the probes' pieces have the tokens of the whole probes, else no split points."""
        for text in (*tokenizer_probes.TEXTS, *rendered):
            pieces = map(self.whole, cuts.pieces(text, self._library.least_chars))
            if sum(pieces, array("I")) != self.whole(text):
                log.error(
                    "pieces of a text have other tokens than the whole text; split points are disabled", cuts=cuts
                )
                return SplitPoints()
        return cuts

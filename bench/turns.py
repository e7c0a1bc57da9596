"""CPU time of a conversation's next turn: of gateway and router, and of its tokens beside tokenising the whole prompt."""

from __future__ import annotations

import asyncio
import http.client
import json
import sysconfig
import tempfile
import time
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from bench import stack
from bench.figures import Figure, percentile
from pointsman_gateway.core.api import ApiCall, Endpoint, parse
from pointsman_gateway.core.api.decode_body import decode_light
from pointsman_gateway.core.tokens.chat_template import ChatTemplate
from pointsman_gateway.core.tokens.model_tokenizer import ModelTokenizer
from pointsman_gateway.core.tokens.token_cache import TokenCache, TokenIds

# Characters of prompt, number of messages, number of conversations, and the goal in ms. A turn adds an answer and a question of
# half ADDED characters each.
SIZES = {"32k": (32_000, 20, 8, 1.0), "400k": (400_000, 120, 3, 5.0)}
ADDED = 1_000
TURNS = 10
Timed = TypeVar("Timed")
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


async def turns() -> list[Figure]:
    """turn_32k_ms and turn_400k_ms, and turn_tokens_* for the tokens alone."""
    text = text_of_code()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        tokenizer = await asyncio.to_thread(make_model, model, text)
        figures = [figure for name in SIZES for figure in _tokens_alone(name, tokenizer, text)]
        async with stack.engine(0.0, str(model)) as engine, stack.pointsman([engine], str(model)) as (gateway, router):
            for name, (_, _, conversations, goal) in SIZES.items():
                talks = [Conversation(name, text, at) for at in range(conversations)]
                await run_turns(gateway.port, talks, 1)
                before = [stack.cpu_s(*process.pids) for process in (gateway, router)]
                await run_turns(gateway.port, talks, TURNS)
                now = [stack.cpu_s(*process.pids) for process in (gateway, router)]
                each = [(end - start) * 1e3 / (TURNS * conversations) for start, end in zip(before, now, strict=True)]
                note = f"CPU of gateway ({each[0]:.2f}) and router ({each[1]:.2f}), C={conversations}, "
                note += f"a turn of {ADDED} new characters; baseline is the goal"
                figures.append(Figure(f"turn_{name}_ms", sum(each), "ms", goal, note))
    return figures


class Conversation:
    """A conversation of a size of SIZES, made of `text`; next() adds a turn. Another `number` gives another conversation."""

    def __init__(self, name: str, text: str, number: int) -> None:
        size, count, _, _ = SIZES[name]
        self._text = text
        self._at = number * 450_000
        roles = ["user", "assistant"] * (count // 2)
        # An odd number of messages, so that the last one is a question.
        self.messages = [self._message(role, size // count) for role in roles[:-1]]

    def body(self) -> bytes:
        """Return the request of the turn that is next."""
        return json.dumps({"model": stack.MODEL, "messages": self.messages, "max_tokens": 1}).encode()

    def next(self) -> None:
        """Add an answer and a question."""
        self.messages += [self._message(role, ADDED // 2) for role in ("assistant", "user")]

    def _message(self, role: str, length: int) -> dict[str, str]:
        self._at = (self._at + length) % (len(self._text) - length)
        return {"role": role, "content": self._text[self._at : self._at + length]}


async def run_turns(port: int, talks: list[Conversation], turns: int) -> None:
    """Run all conversations at once, each on its own connection and thread."""
    await asyncio.gather(*(asyncio.to_thread(_run_one, port, talk, turns) for talk in talks))


def _run_one(port: int, talk: Conversation, turns: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    for _ in range(turns):
        connection.request("POST", Endpoint.CHAT.value, talk.body(), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        body = answer.read()
        if answer.status != 200:
            raise RuntimeError(body.decode())
        talk.next()
    connection.close()


def _tokens_alone(name: str, tokenizer: Tokenizer, text: str) -> list[Figure]:
    template = ChatTemplate(TEMPLATE, {}, datetime.now)
    cache = TokenCache(128 << 20)
    model = ModelTokenizer(tokenizer, template, None, cache=cache)
    talk = Conversation(name, text, 0)
    spent: dict[str, list[float]] = {step: [] for step in ("parse", "render", "tokenize", "keys", "whole")}

    def timed(step: str, work: Callable[[], Timed]) -> Timed:
        started = time.process_time()
        done = work()
        spent[step].append((time.process_time() - started) * 1e3)
        return done

    def parsed(raw: bytes) -> ApiCall:
        return parse(Endpoint.CHAT, raw, light_body=decode_light(raw))

    def tokenize_whole(chat: dict[str, Any]) -> TokenIds:
        return model.whole(template.render(chat))

    for turn in range(TURNS + 1):
        raw = talk.body()
        if not turn:
            cache.keys(model.prompt(parsed(raw)).ids, "m")
        else:
            call = timed("parse", partial(parsed, raw))
            pending = timed("render", partial(model.prepare, call))
            prompt = timed("tokenize", pending.tokenize)
            timed("keys", partial(cache.keys, prompt.ids, "m"))
            whole = timed("whole", partial(tokenize_whole, call.body))
            if whole != prompt.ids:
                raise RuntimeError("pieces have other tokens than the whole")
        talk.next()
    middle = {step: percentile(times, 0.5) for step, times in spent.items()}
    whole_ms = middle.pop("whole")
    steps = ", ".join(f"{step} {ms:.2f}" for step, ms in middle.items())
    note = f"CPU of a turn's tokens and keys ({steps}; render with look-up); baseline: the whole prompt tokenised"
    return [Figure(f"turn_tokens_{name}_ms", sum(middle.values()), "ms", whole_ms, note)]


def text_of_code() -> str:
    """Return text of code and prose: files of Python's standard library."""
    library = Path(sysconfig.get_path("stdlib"))
    return "".join(file.read_text(errors="ignore") for file in sorted(library.glob("*.py"))[:80])


def make_model(folder: Path, text: str) -> Tokenizer:
    """Train a byte-level BPE of 8,000 tokens with Qwen's split, write it into `folder` as a model's tokenizer, and return it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=8_000,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text[:1_000_000]], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return tokenizer

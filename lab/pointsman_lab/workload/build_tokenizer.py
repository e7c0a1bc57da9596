"""Builds the project's own small tokenizer, so that nothing has to be downloaded:
`python -m pointsman_lab.workload.build_tokenizer`.

It is a byte-level BPE (any text round-trips) with the split pattern and the ChatML template of the Qwen family, trained on text
that this script writes. Most words are one token each with their leading space; the replay and the engine model rely on that.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from pointsman_lab.workload.tokenizer import DATA_DIR, TOKENIZER_DIR

VOCAB_SIZE = 2048
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Qwen2's pre-tokenizer pattern: https://huggingface.co/Qwen/Qwen2.5-7B/blob/main/tokenizer.json
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

STEMS = (DATA_DIR / "stems.txt").read_text().split()
SMALL = (DATA_DIR / "small_words.txt").read_text().split()

CODE = """
def {a}_{b}(self, {c}: int, *, {d}: str = "") -> None:
    if {c} > 0 and not self.{a}:
        raise ValueError(f"{a} {{{c}}}")
    for {d} in range({c}):
        self.{b}.append({d})
    return {{"{a}": {c}, "{b}": [{d}]}}

class {A}{B}:
    async def {c}(self) -> dict[str, list[int]]:
        async with self.{d} as {a}:
            await {a}.{b}()

import {a}, {b}
from {c} import {d}
$ git {a} -m "{b}: {c} {d}" && make test
{{"role": "user", "content": "{a} {b}", "tool_calls": [{{"name": "{c}", "arguments": {{}}}}]}}
""".strip("\n")
OTHER = "Zürich façade naïve café – „Straße“ … こんにちは 世界 привет мир 你好 مرحبا 🚂🛤️ 3.14 1,024 2026-01-31 12:30:59 0x7f http://127.0.0.1:8000/v1\n"

# Qwen2.5's chat template without its default system message, which would hide a prompt's first tokens from the caller.
CHAT_TEMPLATE = (DATA_DIR / "chat_template.jinja").read_text()


def words() -> list[str]:
    """Return the words of the vocabulary's source text, sorted: stems with their endings, and small words."""
    endings = ("", "s", "ing", "ed")
    return sorted({stem + end for stem in STEMS for end in endings} | set(SMALL))


def training_text(seed: int = 0) -> list[str]:
    """Return the training documents: shuffled prose in which all words occur about equally often, code, and other scripts."""
    rng = random.Random(seed)
    pool = words()
    documents = [OTHER, OTHER]
    for _ in range(40):
        rng.shuffle(pool)
        documents += [" " + " ".join(pool[start : start + 12]) + "." for start in range(0, len(pool), 12)]
    for _ in range(60):
        a, b, c, d = rng.sample(STEMS, 4)
        documents.append(CODE.format(a=a, b=b, c=c, d=d, A=a.title(), B=b.title()))
    return documents


def make(folder: Path) -> Tokenizer:
    """Train the tokenizer and write tokenizer.json and tokenizer_config.json into `folder`. The files are the same every time."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_text(), trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 131072,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    return tokenizer


if __name__ == "__main__":
    make(Path(sys.argv[1]) if len(sys.argv) > 1 else TOKENIZER_DIR)

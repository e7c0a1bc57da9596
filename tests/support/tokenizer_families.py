"""Tokenizers and chat templates of real model families. Only their vocabularies differ: they are small and trained here."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from pointsman_gateway.core.tokens.chat_template import ChatTemplate
from pointsman_gateway.core.tokens.model_tokenizer import ModelTokenizer
from pointsman_gateway.core.tokens.token_cache import TokenCache

QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

QWEN_TEMPLATE = """{%- if tools %}{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n\\n<tools>' }}{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- elif message.role == 'assistant' %}
{%- set content = message.content.split('</think>')[-1].lstrip('\\n') if not loop.last else message.content %}
{{- '<|im_start|>assistant\\n' + content + '<|im_end|>\\n' }}
{%- elif not (message.role == 'system' and loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

LLAMA3_TEMPLATE = (
    "{% for message in messages %}{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    " + message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}"
    "{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)

MISTRAL_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{{ ' ' + message['content'] + eos_token }}{% else %}{{ '[INST] ' + message['content'] + ' [/INST]' }}{% endif %}"
    "{% endfor %}"
)

CORPUS = [
    "Set the points so that each train takes the right track. The signal's clear; we'll go at 17:45.",
    "def place(request: Request) -> Placement:\n    # pick and reserve\n    return min(view, key=lambda i: i.load)\n",
    "f();\n// a\n//\n/ b //\n/ c */\n/\n" * 9,  # makes Tekken learn merges of newlines and slashes
    "Die Weiche führt nach Übersee, naïve café, Привет, 你好世界 こんにちは 🚂🛤️\r\n\r\n\tA/B //* comment */\n\n\n  two\n",
] * 3


def _bpe(split: str, specials: list[str], **more: object) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def qwen() -> Tokenizer:
    """Return Qwen's kind: NFC, single digits, ChatML."""
    tokenizer = _bpe(QWEN_SPLIT, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.normalizer = normalizers.NFC()
    # As in Qwen: added tokens that are not special, but are matched on the raw text.
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("<think>", "</think>", "<tool_call>")])
    return tokenizer


def llama3() -> Tokenizer:
    """Return Llama 3's kind: digits in groups of three, a beginning token that the post-processor adds."""
    specials = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    tokenizer = _bpe(LLAMA3_SPLIT, specials)
    template = processors.TemplateProcessing(
        single="<|begin_of_text|> $A",
        special_tokens=[("<|begin_of_text|>", tokenizer.token_to_id("<|begin_of_text|>"))],
    )
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return tokenizer


def tekken() -> Tokenizer:
    """Return Mistral's newer kind: control tokens in brackets, words split by case."""
    return _bpe(TEKKEN_SPLIT, ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]"])


def mistral(prepend_scheme: str = "first") -> Tokenizer:
    """Return Mistral's older kind, as transformers converts it: sentencepiece BPE after a Metaspace, with `<s>` prepended."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme, split=False)
    return _sentencepiece(tokenizer)


def llama2() -> Tokenizer:
    """Return the legacy kind of Llama 2: a normaliser that prepends a blank to every part."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return _sentencepiece(tokenizer)


def _sentencepiece(tokenizer: Tokenizer) -> Tokenizer:
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=specials, show_progress=False)
    tokenizer.train_from_iterator([word for text in CORPUS for word in text.split()], trainer)
    # In the real file only the first three of the trained special tokens are added tokens. The fresh copy has only those three.
    fresh = Tokenizer(tokenizer.model)
    if tokenizer.normalizer is not None:
        fresh.normalizer = tokenizer.normalizer
    if tokenizer.pre_tokenizer is not None:
        fresh.pre_tokenizer = tokenizer.pre_tokenizer
    fresh.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in specials[:3]])
    fresh.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", fresh.token_to_id("<s>"))]
    )
    return fresh


FAMILIES: dict[str, tuple[Callable[[], Tokenizer], str, dict[str, str]]] = {
    "qwen": (qwen, QWEN_TEMPLATE, {}),
    "llama3": (llama3, LLAMA3_TEMPLATE, {"bos_token": "<|begin_of_text|>"}),
    "tekken": (tekken, MISTRAL_TEMPLATE, {"bos_token": "<s>", "eos_token": "</s>"}),
    "mistral": (mistral, MISTRAL_TEMPLATE, {"bos_token": "<s>", "eos_token": "</s>"}),
    "llama2": (llama2, MISTRAL_TEMPLATE, {"bos_token": "<s>", "eos_token": "</s>"}),
}


def model(family: str, cache: TokenCache) -> tuple[ModelTokenizer, ChatTemplate]:
    """Return one family's tokenizer and template, as the gateway uses them."""
    make, source, specials = FAMILIES[family]
    template = ChatTemplate(source, specials, lambda: datetime(2026, 3, 4))
    return ModelTokenizer(make(), template, None, cache=cache), template


# Special tokens of every family, whole and broken, to insert into texts.
SPECIALS = [
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|begin_of_text|>",
    "[INST]",
    "[/INST]",
    "<s>",
    "</s>",
    "<unk>",
    "<think>",
    "</think>",
    "<|im_",
    "start|>",
    "<|",
    "|>",
    "<0x0A>",
]

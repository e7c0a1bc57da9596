"""A small random Qwen3 model, made here: no downloads, the same bytes for the same seed.

The folder that `make_model` writes is what a real vLLM server loads: config, byte-level BPE tokenizer with a ChatML template,
weights. Three properties make it fit for tests about prefix caches:

- Greedy answers depend on the whole context and do not fall into a loop (embeddings of unit scale, peaked attention).
- Answers consist of whole words, each one token with its leading space, so that an answer sent back in the next turn becomes
  the very tokens that were generated, and a prompt of n `words` has n tokens.
- The model never stops by itself: an answer is as long as max_tokens says.

Run by the engine's Python, which has safetensors: `python model.py FOLDER [ADAPTER_FOLDER]`. Only weights need numpy and
safetensors.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

SEED = 7
HIDDEN = 256
LAYERS = 4
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 64
INTERMEDIATE = 512
MAX_POSITION = 16_384
VOCAB = 1_024
RANK = 8
# Attention scores have the spread of its square: enough that single earlier tokens matter, however long the context.
PEAKED = 1.7
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

# Qwen's own split, so that the gateway's tokenizer meets what it meets in production (digits one by one, contractions).
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = """\
{%- if tools %}
<|im_start|>system
# Tools
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
<|im_end|>
{% endif -%}
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\n' + (message['content'] or '') + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{%- endif %}
"""


def vocabulary() -> list[str]:
    """The 300 made-up words that prompts and answers consist of; each is one token when a space precedes it."""
    heads = ("ba", "de", "ki", "lo", "mu", "na", "po", "ra", "se", "ti")
    middles = ("l", "nd", "r")
    tails = ("a", "e", "i", "o", "u", "an", "en", "is", "or", "um")
    return [head + middle + tail for head in heads for middle in middles for tail in tails]


def words(count: int, seed: int) -> str:
    """A text of `count` words that are `count` tokens (it begins with a space). Another seed gives another text."""
    rng = random.Random(seed)
    return "".join(" " + rng.choice(vocabulary()) for _ in range(count))


def make_tokenizer(folder: Path, special: Sequence[str] = SPECIAL, template: str = CHAT_TEMPLATE) -> None:
    """Train the tokenizer and write tokenizer.json and tokenizer_config.json. Raises ValueError when the model has no room."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        ["".join(f" {word}" for word in vocabulary()), "system\nuser\nassistant\n"] * 3, trainer
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_POSITION,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
    if (known := tokenizer.get_vocab_size()) > VOCAB:
        raise ValueError(f"the tokenizer has {known} tokens, the model {VOCAB}")


def make_plain(folder: Path, tokens: Sequence[str]) -> None:
    """Make special tokens of the folder's tokenizer a part of the text, as Qwen's for tool calls are."""
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    for token in tokenizer["added_tokens"]:
        token["special"] = token["special"] and token["content"] not in tokens
    file.write_text(json.dumps(tokenizer))


def text_config() -> dict[str, Any]:
    """The model's config.json."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "float32",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_POSITION,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "attention_bias": False,
        "tie_word_embeddings": False,
        "vocab_size": VOCAB,
        "eos_token_id": SPECIAL.index("<|im_end|>"),
        "pad_token_id": SPECIAL.index("<|endoftext|>"),
    }


def make_config(folder: Path, config: dict[str, Any]) -> None:
    """Write config.json and generation_config.json."""
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    generation = {"eos_token_id": [SPECIAL.index("<|im_end|>")]}
    (folder / "generation_config.json").write_text(json.dumps(generation))


def text_weights(folder: Path, seed: int, *, only_words: bool = True) -> dict[str, Any]:
    """Weights by name: float32, random, seeded. Rows of the output head that stand for no whole word of the folder's tokenizer
    are zero if `only_words`."""
    import numpy as np

    rng = np.random.default_rng(seed)
    weights: dict[str, Any] = {}

    def matrix(name: str, rows: int, columns: int, gain: float = 1.0) -> None:
        """Entries of scale gain / sqrt(columns): a unit input gives an output of scale `gain`."""
        weights[name] = (rng.standard_normal((rows, columns)) * (gain / columns**0.5)).astype(np.float32)

    def scale(name: str, size: int, value: float = 1.0) -> None:
        weights[name] = np.full(size, value, dtype=np.float32)

    matrix("model.embed_tokens.weight", VOCAB, HIDDEN, gain=HIDDEN**0.5)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        scale(prefix + "input_layernorm.weight", HIDDEN)
        matrix(prefix + "self_attn.q_proj.weight", HEADS * HEAD_DIM, HIDDEN)
        matrix(prefix + "self_attn.k_proj.weight", KV_HEADS * HEAD_DIM, HIDDEN)
        matrix(prefix + "self_attn.v_proj.weight", KV_HEADS * HEAD_DIM, HIDDEN)
        matrix(prefix + "self_attn.o_proj.weight", HIDDEN, HEADS * HEAD_DIM, gain=3.0)
        scale(prefix + "self_attn.q_norm.weight", HEAD_DIM, PEAKED)
        scale(prefix + "self_attn.k_norm.weight", HEAD_DIM, PEAKED)
        scale(prefix + "post_attention_layernorm.weight", HIDDEN)
        matrix(prefix + "mlp.gate_proj.weight", INTERMEDIATE, HIDDEN)
        matrix(prefix + "mlp.up_proj.weight", INTERMEDIATE, HIDDEN)
        matrix(prefix + "mlp.down_proj.weight", HIDDEN, INTERMEDIATE, gain=2.0)
    scale("model.norm.weight", HIDDEN)
    matrix("lm_head.weight", VOCAB, HIDDEN, gain=4.0)
    if only_words:
        spoken = np.zeros(VOCAB, dtype=bool)
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        for word in vocabulary():
            (token,) = tokenizer.encode(" " + word, add_special_tokens=False).ids
            spoken[token] = True
        weights["lm_head.weight"][~spoken] = 0.0
    return weights


def save_weights(folder: Path, weights: dict[str, Any]) -> None:
    """Write model.safetensors."""
    from safetensors.numpy import save_file

    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})


def make_model(folder: Path, seed: int = SEED) -> Path:
    """Write the whole model into `folder` (made when missing) and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer(folder)
    make_config(folder, text_config())
    save_weights(folder, text_weights(folder, seed))
    return folder


def make_adapter(folder: Path, seed: int = SEED) -> Path:
    """Write a random LoRA adapter of the model into `folder` and return it: strong enough that answers differ at once."""
    import numpy as np
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    weights: dict[str, Any] = {}
    for layer in range(LAYERS):
        for name, rows in (("q_proj", HEADS * HEAD_DIM), ("v_proj", KV_HEADS * HEAD_DIM)):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}."
            weights[prefix + "lora_A.weight"] = (rng.standard_normal((RANK, HIDDEN)) / HIDDEN**0.5).astype(np.float32)
            weights[prefix + "lora_B.weight"] = rng.standard_normal((rows, RANK)).astype(np.float32)
    save_file(weights, str(folder / "adapter_model.safetensors"), metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(folder),
        "r": RANK,
        "lora_alpha": RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["q_proj", "v_proj"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


if __name__ == "__main__":
    print(make_model(Path(sys.argv[1])))
    if len(sys.argv) > 2:
        make_adapter(Path(sys.argv[2]))

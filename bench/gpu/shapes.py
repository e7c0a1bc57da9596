"""Shapes of models whose weights are made up, and how the memory of one card is divided among several engines. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

GB = 10**9
# Share of a card's memory that engines may take together: the rest is the driver's and the display's.
USABLE_SHARE = 0.92
# What an engine takes beside weights, KV and activations: the CUDA context, graphs, workspaces of libraries, fragmentation.
CONTEXT_BYTES = int(1.2 * GB)
# Activations of a step are counted as so many values of 2 bytes for each token and each of the widths: an estimate that is meant
# to be too large. No card has confirmed it yet.
ACTIVATION_VALUES = 3


@dataclass(frozen=True)
class Shape:
    """A dense Qwen3 model."""

    name: str  # as the page shows it
    # Widths of the residual stream and of the MLP.
    hidden: int
    intermediate: int  # see above
    layers: int  # number of decoder layers
    heads: int  # query heads of a layer
    kv_heads: int  # heads of K and of V
    head_dim: int  # width of a head
    vocabulary: int  # number of tokens
    tied: bool  # whether the output head is the embedding
    context: int  # the most tokens of a prompt with its answer
    value_bytes: int  # of a weight, and of a value in the KV cache

    @property
    def parameters(self) -> int:
        """Number of weights."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads) + 2 * self.head_dim
        layer = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return self.layers * layer + self.vocabulary * self.hidden * (1 if self.tied else 2) + self.hidden

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V of one token."""
        return self.layers * 2 * self.kv_heads * self.head_dim * self.value_bytes

    def engine_bytes(self, step_tokens: int, kv_tokens: int) -> int:
        """Return the memory of an engine that computes up to `step_tokens` in a step and keeps the KV of `kv_tokens`."""
        activations = step_tokens * (2 * self.intermediate + 2 * self.hidden) * 2 * ACTIVATION_VALUES
        weights = self.parameters * self.value_bytes
        return CONTEXT_BYTES + activations + weights + kv_tokens * self.kv_bytes_per_token

    def config(self) -> dict[str, Any]:
        """Return the model's config.json, without the ids of special tokens."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "dtype": "bfloat16" if self.value_bytes == 2 else "float32",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.context,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "attention_bias": False,
            "tie_word_embeddings": self.tied,
            "vocab_size": self.vocabulary,
        }


def _qwen3(name: str, hidden: int, intermediate: int, layers: int, heads: int, *, tied: bool) -> Shape:
    return Shape(name, hidden, intermediate, layers, heads, 8, 128, 151_936, tied, 40_960, 2)


# The published shapes, the smallest first.
QWEN3 = (
    _qwen3("Qwen3 0.6B", 1_024, 3_072, 28, 16, tied=True),
    _qwen3("Qwen3 1.7B", 2_048, 6_144, 28, 16, tied=True),
    _qwen3("Qwen3 4B", 2_560, 9_728, 36, 32, tied=True),
    _qwen3("Qwen3 8B", 4_096, 12_288, 36, 32, tied=False),
)
# For engines on CPU: the same architecture, in float32.
TINY = Shape("Qwen3, 4 layers of 256", 256, 512, 4, 4, 2, 64, 16_384, False, 16_384, 4)


@dataclass(frozen=True)
class MemoryPlan:
    """How several engines share a card. `fraction`: of the card's memory, for each engine (vLLM's --gpu-memory-utilization)."""

    shape: Shape
    engines: int
    kv_tokens: int
    fraction: float


def memory_plan(
    card_bytes: int, engines: Sequence[int], kv_tokens: Sequence[int], step_tokens: int, shapes: Sequence[Shape] = QWEN3
) -> MemoryPlan:
    """Return the plan for the first of the numbers of `engines` and of the `kv_tokens` (each: for one engine) that fit, tokens
    before engines, with the largest of `shapes` that fits with them. Raises ValueError if nothing fits."""
    usable = int(card_bytes * USABLE_SHARE)
    for count in engines:
        for tokens in kv_tokens:
            for shape in sorted(shapes, key=lambda shape: -shape.parameters):
                needed = shape.engine_bytes(step_tokens, tokens)
                if count * needed <= usable:
                    # vLLM compares this with the memory that is free when it starts; the size of the KV cache is given apart.
                    return MemoryPlan(shape, count, tokens, needed / card_bytes)
    smallest = min(shapes, key=lambda shape: shape.parameters)
    needed = min(engines) * smallest.engine_bytes(step_tokens, min(kv_tokens))
    raise ValueError(
        f"{min(engines)} engines of {smallest.name} need {needed / GB:.0f} GB, and this card has {usable / GB:.0f} GB for them"
    )

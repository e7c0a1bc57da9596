"""A small random model that sees: Idefics3's form and eyes before the text model of tests/support/engines/model.py. No downloads.

Of the forms that vLLM knows it is the simplest whose image processor does without torchvision.

An image becomes `IMAGE_TOKENS` tokens in the place of its `<image>`, whatever its size, and answers depend on it. Prompts without
images are read as the text model reads them.

Run by the engine's Python: `python vision_model.py FOLDER`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Run as a script it lies beside model.py; tests import both from the package.
if TYPE_CHECKING:
    from tests.support.engines import model as text
else:
    sys.path.insert(0, str(Path(__file__).parent))
    import model as text

SEED = 11
IMAGE = "<image>"
SPECIAL = (*text.SPECIAL, "<fake_token_around_image>", IMAGE, "<global-img>", "<end_of_utterance>")
PIXELS = 64
PATCH = 8
PATCHES = (PIXELS // PATCH) ** 2
IMAGE_TOKENS = PATCHES + 3  # <fake_token_around_image><global-img> before them and <fake_token_around_image> after them
WIDTH = 64
MLP = 128
HEADS = 2

# Qwen 2 VL's way: parts in their order, images where they stand.
CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['content'] is string %}
{{- message['content'] }}
{%- else %}
{%- for part in message['content'] %}
{%- if part['type'] == 'image' %}
{{- '<image>' }}
{%- elif part['type'] == 'text' %}
{{- part['text'] }}
{%- endif %}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def config() -> dict[str, Any]:
    """The model's config.json."""
    return {
        "architectures": ["Idefics3ForConditionalGeneration"],
        "model_type": "idefics3",
        "dtype": "float32",
        "text_config": text.text_config() | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
        "vision_config": {
            "model_type": "idefics3_vision",
            "hidden_size": WIDTH,
            "intermediate_size": MLP,
            "num_hidden_layers": 1,
            "num_attention_heads": HEADS,
            "image_size": PIXELS,
            "patch_size": PATCH,
        },
        "image_token_id": SPECIAL.index(IMAGE),
        "scale_factor": 1,
        "tie_word_embeddings": False,
    }


def make_processor(folder: Path) -> None:
    """Write preprocessor_config.json and processor_config.json."""
    pixels = {
        "image_processor_type": "Idefics3ImageProcessor",
        "do_image_splitting": False,
        "size": {"longest_edge": PIXELS},
        "max_image_size": {"longest_edge": PIXELS},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(pixels))
    processor = {"processor_class": "Idefics3Processor", "image_seq_len": PATCHES}
    (folder / "processor_config.json").write_text(json.dumps(processor))


def text_weights(folder: Path, seed: int) -> dict[str, Any]:
    """The text model's, in Llama's form: queries are scaled here that Qwen3 scales by its norms."""
    weights = {}
    for name, weight in text.text_weights(folder, seed).items():
        if "_norm.weight" in name and "self_attn" in name:
            continue
        scaled = weight * text.PEAKED**2 if name.endswith("q_proj.weight") else weight
        weights[name.replace("model.", "model.text_model.", 1)] = scaled
    return weights


def vision_weights(seed: int) -> dict[str, Any]:
    """Weights of the eyes and of what brings their features to the scale of the text's embeddings."""
    import numpy as np

    rng = np.random.default_rng(seed)
    weights: dict[str, Any] = {}

    def random(name: str, *shape: int, gain: float = 1.0) -> None:
        """Entries of scale gain / sqrt(inputs): a unit input gives an output of scale `gain`."""
        weights[name] = (rng.standard_normal(shape) * (gain / np.prod(shape[1:]) ** 0.5)).astype(np.float32)

    def linear(name: str, rows: int, columns: int) -> None:
        random(f"{name}.weight", rows, columns)
        weights[f"{name}.bias"] = np.zeros(rows, dtype=np.float32)

    def norm(name: str) -> None:
        weights[f"{name}.weight"] = np.ones(WIDTH, dtype=np.float32)
        weights[f"{name}.bias"] = np.zeros(WIDTH, dtype=np.float32)

    eyes = "model.vision_model."
    random(eyes + "embeddings.patch_embedding.weight", WIDTH, 3, PATCH, PATCH, gain=4.0)
    weights[eyes + "embeddings.patch_embedding.bias"] = np.zeros(WIDTH, dtype=np.float32)
    random(eyes + "embeddings.position_embedding.weight", PATCHES, WIDTH, gain=WIDTH**0.5)
    layer = eyes + "encoder.layers.0."
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        linear(f"{layer}self_attn.{name}", WIDTH, WIDTH)
    norm(layer + "layer_norm1")
    norm(layer + "layer_norm2")
    linear(layer + "mlp.fc1", MLP, WIDTH)
    linear(layer + "mlp.fc2", WIDTH, MLP)
    norm(eyes + "post_layernorm")
    random("model.connector.modality_projection.proj.weight", text.HIDDEN, WIDTH)
    return weights


def make_model(folder: Path, seed: int = SEED) -> Path:
    """Write the whole model into `folder` (made when missing) and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    text.make_tokenizer(folder, SPECIAL, CHAT_TEMPLATE)
    text.make_config(folder, config())
    make_processor(folder)
    text.save_weights(folder, text_weights(folder, seed) | vision_weights(seed))
    return folder


if __name__ == "__main__":
    print(make_model(Path(sys.argv[1])))

"""The text model of tests/support/engines/model.py, which says any token but white space, not only whole words: where a grammar
forces a tool call, names, enums, numbers and texts of all scripts are the model's own choice, and so is the number of calls. Its
template renders calls and their results.

Run by the engine's Python: `python calling_model.py FOLDER`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

# Run as a script it lies beside model.py; tests import both from the package.
if TYPE_CHECKING:
    from tests.support.engines import model as text
else:
    sys.path.insert(0, str(Path(__file__).parent))
    import model as text

CONSTANT, LOW, HIGH = 4.0, -200.0, 200.0
# What is the same in each call is few tokens: calls are short.
MARKUP = (
    '<tool_call>\n{"name": "',
    '", "arguments": ',
    "}\n</tool_call>",
    *(f'"{key}":' for key in ("path", "lines", "edits", "old", "new", "every", "kind", "options", "deep", "ratio")),
    *(f'"{key}":' for key in ("state", "tags", "command", "root", "name", "below", "text")),
)
CONTENT = "(message['content'] or '')"
CALLS = """ }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}
{%- endfor %}
{{-"""


def make_model(folder: Path) -> Path:
    """Write the whole model into `folder` (made when missing) and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    template = text.CHAT_TEMPLATE.replace(f"{CONTENT} +", f"{CONTENT}{CALLS}")
    text.make_tokenizer(folder, (*text.SPECIAL, *MARKUP), template)
    text.make_plain(folder, MARKUP)
    text.make_config(folder, text.text_config())
    weights = text.text_weights(folder, text.SEED, only_words=False)
    # One dimension of the hidden state is constant, and with it low scores of white space, which grammars allow without end,
    # and of control characters, which vLLM's grammars allow in texts. High are those of markup, and the end's against it.
    weights["model.embed_tokens.weight"][:, 0] = CONSTANT
    for layer in range(text.LAYERS):
        weights[f"model.layers.{layer}.self_attn.o_proj.weight"][0] = 0.0
        weights[f"model.layers.{layer}.mlp.down_proj.weight"][0] = 0.0
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for token in range(tokenizer.get_vocab_size()):
        said = tokenizer.decode([token], skip_special_tokens=False)
        if said in (*MARKUP, "<|im_end|>"):
            weights["lm_head.weight"][token, 0] = HIGH
        elif not said.strip() or min(said) < " ":
            weights["lm_head.weight"][token, 0] = LOW
    text.save_weights(folder, weights)
    return folder


if __name__ == "__main__":
    print(make_model(Path(sys.argv[1])))

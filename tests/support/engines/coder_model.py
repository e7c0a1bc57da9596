"""The text model of tests/support/engines/model.py with the two tokens between which Qwen3-Coder writes a tool call, which vLLM's
parser of such calls looks for. A random model makes a call only where its grammar is forced.

Run by the engine's Python: `python coder_model.py FOLDER`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

# Run as a script it lies beside model.py; tests import both from the package.
if TYPE_CHECKING:
    from tests.support.engines import model as text
else:
    sys.path.insert(0, str(Path(__file__).parent))
    import model as text

TOOL_CALL = ("<tool_call>", "</tool_call>")


def make_model(folder: Path) -> Path:
    """Write the whole model into `folder` (made when missing) and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    text.make_tokenizer(folder, (*text.SPECIAL, *TOOL_CALL))
    text.make_plain(folder, TOOL_CALL)
    text.make_config(folder, text.text_config())
    text.save_weights(folder, text.text_weights(folder, text.SEED))
    return folder


if __name__ == "__main__":
    print(make_model(Path(sys.argv[1])))

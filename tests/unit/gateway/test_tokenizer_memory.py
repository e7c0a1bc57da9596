"""What loading a tokenizer leaves behind in memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

LOADED = """
import ctypes, sys
from pathlib import Path
from pointsman_gateway.io.tokenizer_files import load_tokenizer

def resident_mb():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6

loaded = load_tokenizer(Path(sys.argv[1]))
before = resident_mb()
ctypes.CDLL(None).malloc_trim(0)
print(before - resident_mb())
"""


def test_freed_memory_is_returned_after_loading(tmp_path: Path) -> None:
    vocabulary = {character: at for at, character in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    letters, merges = [character for character in vocabulary if character.isascii()], list[tuple[str, str]]()
    for first in letters:
        for second in letters:
            merges.append((first, second))
            merges += [(first + second, third) for third in letters[:4]]
    for one, other in merges:
        vocabulary.setdefault(one + other, len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    left = subprocess.run(
        [sys.executable, "-c", LOADED, str(tmp_path)], capture_output=True, text=True, check=True, timeout=120
    )
    assert float(left.stdout.splitlines()[-1]) < 2.0, f"{len(vocabulary)} tokens"

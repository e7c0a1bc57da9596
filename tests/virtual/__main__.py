"""`python -m tests.virtual 0 200`: the seeds from 0 to 199; with one number, that seed's story."""

from __future__ import annotations

import os
import sys
from collections import Counter

from tests.support.virtual.run import run


def main() -> int:
    """The number of seeds that failed, at most 1."""
    if os.environ.get("PYTHONHASHSEED") != "0":
        # The order in sets is part of what a seed stands for.
        os.execve(
            sys.executable,
            [sys.executable, "-m", "tests.virtual", *sys.argv[1:]],
            os.environ | {"PYTHONHASHSEED": "0"},
        )
    first, *end = map(int, sys.argv[1:])
    answers: Counter[int] = Counter()
    failed = 0
    for seed in range(first, end[0] if end else first + 1):
        result = run(seed)
        answers.update(result.answers)
        if result.failure:
            failed += 1
            print(f"seed {seed}: {result.failure}", flush=True)
        if not end:
            print("\n".join(result.story))
    print(f"{failed} failed; answers by status: {dict(sorted(answers.items()))}")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())

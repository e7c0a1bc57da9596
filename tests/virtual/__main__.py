"""`python -m tests.virtual 0 200` runs the seeds 0 to 199. With one number it runs that seed and prints its story.
Of many seeds, a router's own invariants are checked after every CHECK_EACH-th event (loads not counted), of one after each.

`alone 0 200` and `among 0 200` run seeds with ill engines, alone and among other faults.
`measure` prints the costs measured on this machine. `forks` runs seeds on a large fleet that is built in full size.
"""

from __future__ import annotations

import gc
import os
import sys
from collections import Counter

from tests.support.virtual.run import Ill, run
from tests.virtual import forks, measure

# The checks take a fifth of a run's time. What is violated seldom heals by itself within a few events.
CHECK_EACH = 4


def main() -> int:
    """Return the exit status: 1 if a seed failed."""
    if os.environ.get("PYTHONHASHSEED") != "0":
        # A seed is only reproducible with the same order of sets.
        os.execve(
            sys.executable,
            [sys.executable, "-m", "tests.virtual", *sys.argv[1:]],
            os.environ | {"PYTHONHASHSEED": "0"},
        )
    if sys.argv[1:] == ["measure"]:
        return measure.main()
    if sys.argv[1:2] == ["forks"]:
        return forks.main(sys.argv[2:])
    # Rare collections save 5 % of a run's time.
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)
    kinds = [kind for kind in Ill if kind.value == sys.argv[1]]
    first, *end = map(int, sys.argv[1 + len(kinds) :])
    answers: Counter[int] = Counter()
    failed = 0
    for seed in range(first, end[0] if end else first + 1):
        result = run(seed, check_each=CHECK_EACH if end else 1, ill=kinds[0] if kinds else None)
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

"""`python -m bench NAME...` runs benchmarks (bench/named.py), `python -m bench gpu` those of one GPU (bench/gpu).

The latter imports nothing of the former: a machine with a GPU has only what `make gpu-wheels` gathers.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run what the command line names."""
    if sys.argv[1:2] != ["gpu"]:
        from bench.named import main as named

        named()
        return
    from bench.gpu.command import main as gpu

    gpu(sys.argv[2:])


if __name__ == "__main__":
    main()

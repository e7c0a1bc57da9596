"""How layers leave an engine that launches them long before they are computed, as a GPU does: an emulated stream on CPU tensors.

The connector's own workers, in one process; 48 layers of 10 ms, launched in 0.2 ms each, of a prompt whose layers are worth a
write each. The transfer engine copies within the process, so that all of a tail is the connector's.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median

from bench.figures import Figure
from tests.support.engines.servers import make_model
from tests.support.engines.vllm_questions import asking_vllm

LAYERS, LAYER_MS, LAUNCH_MS, ROUNDS = 48, 10.0, 0.2, 5
ASK = "import emulated_offload; answer = emulated_offload.layer_by_layer(**asked)"
CHECKS = "import emulated_offload; answer = emulated_offload.checksum_ms(**asked)"
# The goals: so many writes, and the last one so many layers after the last layer.
WRITES, LAST_LAYERS = 40, 1.2


def layer_events() -> list[Figure]:
    """Medians of ROUNDS prompts."""
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model", Path(folder) / "adapter")
        asked = {
            "model_folder": str(model),
            "layers": LAYERS,
            "prompts": 1,
            "layer_ms": LAYER_MS,
            "launch_ms": LAUNCH_MS,
        }
        with asking_vllm(Path(folder) / "log") as vllm:
            rounds = [vllm.ask(ASK, asked) for _ in range(ROUNDS)]
            checks = vllm.ask(CHECKS, {"model_folder": str(model), "layers": LAYERS, "rounds": 100})
    writes = median(figures["writes"] for figures in rounds)
    last = median(figures["last_write_after_s"] for figures in rounds) / (LAYER_MS / 1e3)
    note = f"{LAYERS} layers of {LAYER_MS:g} ms, launched in {LAUNCH_MS:g} ms each; baseline is the goal"
    return [
        Figure("layer_events_writes", writes, "writes", WRITES, note),
        Figure("layer_events_last_layers", last, "layers", LAST_LAYERS, "end of the last write after the last layer"),
        Figure(
            "kv_checksums_ms",
            checks["ms"],
            "ms",
            None,
            f"CPU of one side of a checked transfer, which reads {checks['mib']:.0f} MiB",
        ),
    ]

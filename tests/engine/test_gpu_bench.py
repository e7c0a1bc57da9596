"""`python -m bench gpu` runs on a CPU in its smallest form, and its figures are those of transfers that were right."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.gpu import device
from bench.gpu.device import CUDA, GRAPHS, SIZES, Card, Device
from bench.gpu.results import COMPLETE, file_of, load
from tests.support.engines.servers import LAYERWISE, Engine
from tests.support.engines.vllm_questions import Vllm
from tests.support.repository import REPOSITORY

pytestmark = [pytest.mark.engine, pytest.mark.timeout(700)]


# Reads command lines and writes what vLLM parsed from them.
PARSE = """
from vllm.config import CompilationConfig
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser
answer = []
for words in asked:
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    validate_parsed_serve_args(args)
    graphs = args.compilation_config.cudagraph_capture_sizes
    answer.append([args.load_format, args.dtype, args.gpu_memory_utilization, args.kv_cache_memory_bytes, args.max_model_len,
        args.enforce_eager, graphs, args.enable_sleep_mode, args.kv_transfer_config.kv_connector_extra_config])
"""


def test_vllm_takes_the_flags_of_engines_on_a_card(vllm: Vllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "card", lambda: Card("card", "1", 80 * 2**30))
    flags = []
    for eager in (False, True):
        where = Device(CUDA, SIZES[CUDA], eager=eager, protocol="rdma")
        plan = where.plan((4,), (49_000,))
        spec = where.spec(
            "a",
            plan,
            32_832,
            kv_transfer=where.kv_transfer(LAYERWISE),
            extra_args=("--enable-sleep-mode", "--enable-scale-out"),
        )
        argv = Engine(spec, tmp_path, tmp_path).process.argv
        flags.append(list(argv[argv.index("vllm.entrypoints.openai.api_server") + 1 :]))
    assert vllm.ask(PARSE, flags) == [
        [
            *("dummy", "bfloat16", round(plan.fraction, 4), 49_000 * plan.shape.kv_bytes_per_token, 32_832),
            *(eager, None if eager else list(GRAPHS), True, {"mooncake_protocol": "rdma"}),
        ]
        for eager in (False, True)
    ]


def test_transfers_between_two_engines_are_measured(tmp_path: Path) -> None:
    words = [
        "--device",
        "cpu",
        "--smallest",
        "--parts",
        "a",
        "--again",
        "--out",
        str(tmp_path),
        "--page",
        str(tmp_path / "gpu.md"),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "bench", "gpu", *words],
        cwd=REPOSITORY,
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    result = load(file_of(tmp_path, "a", "cpu"))
    assert result is not None, done.stderr
    assert (result.status, done.returncode) == (COMPLETE, 0), result.problem
    found = {figure.metric: figure for figure in result.figures}
    for length in ("256", "512"):
        row = f"Qwen3, 4 layers of 256 / {length} tokens / overhead layer by layer"
        assert {f"{row}, {load}" for load in ("idle", "16 decodes")} <= found.keys()
    assert found["tokens loaded"].ratio == found["fetched prefixes found"].ratio == 1.0
    assert found["requests checked by checksums"].value > 0
    assert found["requests with wrong checksums"].value == 0
    assert found["answer equal after aborts"].value == 1.0
    assert "| 512 tokens | 2.1 MB |" in (tmp_path / "gpu.md").read_text()

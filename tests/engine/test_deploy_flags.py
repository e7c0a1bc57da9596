"""The flags with which deploy/ and the pages start vLLM are flags that this vLLM has."""

from __future__ import annotations

import json
import re
import shlex
import subprocess

import yaml

from tests.docs.shell_blocks import BLOCKS
from tests.engine.servers import ENGINE_PYTHON
from tools import check_deploy
from tools.deploycheck import compose, k8s

# Runs in the engine's environment: command lines in as JSON, what vLLM made of them out.
PARSE = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser
parsed = []
for words in json.load(sys.stdin):
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    validate_parsed_serve_args(args)
    events = args.kv_events_config
    parsed.append([events.enable_kv_cache_events, events.replay_endpoint, args.enable_prompt_tokens_details])
print("parsed", json.dumps(parsed))
"""


def compose_flags() -> list[str]:
    folder = check_deploy.DEPLOY / "compose"
    variables, _ = compose.example_env((folder / ".env.example").read_text())
    project = compose.interpolate(yaml.safe_load((folder / "compose.yaml").read_text()), variables)
    flags: list[str] = project["services"]["vllm"]["command"]
    return flags


def k8s_flags(overlay: str) -> list[str]:
    objects = check_deploy.render(check_deploy.DEPLOY / "k8s/overlays" / overlay)
    workload = next(o for o in objects if o["kind"] in k8s.WORKLOADS and o["metadata"]["name"] == "vllm")
    engine = next(c for c in k8s.containers(workload) if c.spec["name"] == "vllm")
    env, _, _ = k8s.environment(engine, objects)
    return [re.sub(r"\$\((\w+)\)", lambda m: env[m[1]], word) for word in engine.spec["args"]]


def pages_flags() -> list[list[str]]:
    commands = [shlex.split(command) for block in BLOCKS for command in block.commands]
    return [words[2:] for words in commands if words[:2] == ["vllm", "serve"]]


def test_vllm_takes_the_flags_of_deploy_and_of_the_pages() -> None:
    pages = pages_flags()
    flags = json.dumps([compose_flags(), k8s_flags("gpu"), k8s_flags("gpu-per-node"), *pages])
    done = subprocess.run([ENGINE_PYTHON, "-c", PARSE], input=flags, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    parsed = json.loads(done.stdout.rpartition("parsed ")[2])
    assert parsed == [
        [True, "tcp://*:5558", True],
        [True, "ipc:///run/kv/replay", True],
        [True, "tcp://*:5558", True],
        *[[True, "tcp://*:5558", True]] * len(pages),
    ]
    assert pages

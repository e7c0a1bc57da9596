"""The flags with which deploy/ and the pages start vLLM are flags that this vLLM has."""

from __future__ import annotations

import re
import shlex

import yaml

from pointsman_agent.core.engine_address import offset_port
from tests.support.docs.shell_blocks import BLOCKS
from tests.support.engines.servers import LAYERWISE
from tests.support.engines.vllm_questions import Vllm
from tools import check_deploy
from tools.deploy_checks import compose, k8s

# Reads command lines and writes what vLLM parsed from them.
PARSE = """
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser
answer = []
for words in asked:
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    validate_parsed_serve_args(args)
    events = args.kv_events_config
    kv = args.kv_transfer_config
    endpoints = [events.endpoint, events.replay_endpoint]
    answer.append([events.enable_kv_cache_events, endpoints, args.enable_prompt_tokens_details,
        [args.enable_auto_tool_choice, args.tool_call_parser, args.allowed_media_domains],
        kv and [kv.kv_connector, kv.kv_connector_module_path, kv.kv_role, kv.kv_connector_extra_config["mooncake_protocol"]]])
"""

# Reads pairs of endpoints and writes those of each of 8 data-parallel ranks.
OFFSET = """
from vllm.distributed.kv_events import ZmqEventPublisher
answer = [[[ZmqEventPublisher.offset_endpoint_port(endpoint, rank) for endpoint in pair] for rank in range(8)] for pair in asked]
"""

# The endpoints of KV events and of their replay.
TCP = ["tcp://*:5557", "tcp://*:5657"]
IPC = ["ipc:///run/kv/tcp-events:1", "ipc:///run/kv/tcp-replay:1"]
# Tool calls are parsed, and nothing that a client names is fetched.
TOOLS = [True, "qwen3_coder", ["media.invalid"]]


def compose_flags(*above: str) -> list[str]:
    """The flags of the first instance, which all instances have."""
    folder = check_deploy.DEPLOY / "compose"
    variables, _ = compose.example_env((folder / ".env.example").read_text())
    parsed = yaml.safe_load((folder / "compose.yaml").read_text())
    for name in above:
        parsed = compose.merge(parsed, yaml.safe_load((folder / name).read_text()))
    services = compose.interpolate(parsed, variables)["services"]
    words = [
        [*service["entrypoint"], *service["command"]] for name, service in services.items() if name.startswith("vllm-")
    ]
    assert len(words) == 8
    assert all(word == words[0] for word in words)
    assert words[0][:2] == ["vllm", "serve"]
    return with_flags_file(words[0][2:])


def with_flags_file(words: list[str]) -> list[str]:
    """The words, with the mounted file replaced by the one of this checkout."""
    assert words[words.index("--config") + 1] == "/etc/pointsman/engine.yaml"
    file = check_deploy.DEPLOY / "k8s/components/settings/engine.yaml"
    return [str(file) if word == "/etc/pointsman/engine.yaml" else word for word in words]


def k8s_flags(overlay: str, workload_name: str = "vllm") -> list[str]:
    objects = check_deploy.render(check_deploy.DEPLOY / "k8s/overlays" / overlay)
    workload = next(o for o in objects if o["kind"] in k8s.WORKLOADS and o["metadata"]["name"] == workload_name)
    engine = next(c for c in k8s.containers(workload) if c.spec["name"] == "vllm")
    env, _, _ = k8s.environment(engine, objects)
    return with_flags_file([re.sub(r"\$\((\w+)\)", lambda m: env[m[1]], word) for word in engine.spec["args"]])


def layerwise(role: str) -> list[str]:
    """What vLLM must parse from the connector's flag."""
    return [LAYERWISE["kv_connector"], LAYERWISE["kv_connector_module_path"], role, "tcp"]


def pages_flags() -> list[list[str]]:
    commands = [shlex.split(command) for block in BLOCKS for command in block.commands]
    return [words[2:] for words in commands if words[:2] == ["vllm", "serve"]]


def test_vllm_takes_the_flags_of_deploy_and_of_the_pages(vllm: Vllm) -> None:
    pages = pages_flags()
    flags = [compose_flags(), compose_flags("offload.yaml"), k8s_flags("gpu"), k8s_flags("gpu-per-node")]
    flags += [k8s_flags("prefill-decode", f"vllm-{role}") for role in ("prefill", "decode")]
    flags += pages
    assert vllm.ask(PARSE, flags) == [
        [True, TCP, True, TOOLS, None],
        [True, TCP, True, TOOLS, layerwise("kv_both")],
        [True, IPC, True, TOOLS, None],
        [True, TCP, True, TOOLS, None],
        [True, IPC, True, TOOLS, layerwise("kv_producer")],
        [True, IPC, True, TOOLS, layerwise("kv_consumer")],
        *[[True, TCP, True, [True, words[words.index("--tool-call-parser") + 1], None], None] for words in pages],
    ]
    assert pages


def test_each_data_parallel_rank_has_its_own_event_endpoints(vllm: Vllm) -> None:
    """vLLM derives them from the flags, and the agent from its options."""
    for pair, ranks in zip((TCP, IPC), vllm.ask(OFFSET, [TCP, IPC]), strict=True):
        assert len({endpoint for endpoints in ranks for endpoint in endpoints}) == 16
        assert ranks == [[offset_port(endpoint, rank) for endpoint in pair] for rank in range(8)]

"""An emulated engine with the command line of `vllm serve`, for pods of deploy/k8s without a GPU.

    python -m tests.support.processes.emulated_vllm serve MODEL --served-model-name=NAME --port=N --kv-events-config=JSON ...

It publishes its KV events at the endpoints of --kv-events-config. The file of --config is read, and other flags are ignored.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import yaml
import zmq

from pointsman_cli.main import main
from pointsman_lab.emulator import kv_event_publisher


def _settings(words: list[str]) -> tuple[list[str], list[str]]:
    """Return the flags of `pointsman emulate`, and the endpoints of KV events and of their replay."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("model")
    for flag in ("--served-model-name", "--port", "--max-model-len", "--kv-events-config", "--config"):
        parser.add_argument(flag, required=True)
    given, _ = parser.parse_known_args(words)
    assert isinstance(yaml.safe_load(Path(given.config).read_text()), dict)
    events = json.loads(given.kv_events_config)
    flags = ["--host", "0.0.0.0", "--port", given.port, "--model", given.served_model_name]
    return [*flags, "--max-model-len", given.max_model_len], [events["endpoint"], events["replay_endpoint"]]


def _binding(endpoints: Iterator[str]) -> Any:
    def bind(socket: zmq.Socket[Any], *_: object) -> str:
        endpoint = next(endpoints)
        socket.bind(endpoint)
        return endpoint

    return bind


if __name__ == "__main__":
    emulated, endpoints = _settings(sys.argv[1:])
    sys.argv[1:] = ["emulate", *emulated]
    with mock.patch.object(kv_event_publisher, "_bind", _binding(iter(endpoints))):
        main()

"""The routers of the scoreboard: each one's own program, as its manual starts it, with its defaults."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from bench.rivals.engines import EngineAddress
from bench.rivals.environments import NotRunnable, environment, locked_version
from pointsman_lab.report.bundle import git_commit
from tests.support.processes.pointsman import flag_words, pointsman_command

POINTSMAN, DYNAMO = "pointsman", "dynamo"
# Pointsman with its default policy; and other policies, which the board leaves to docs/findings.md.
OWN = f"{POINTSMAN} auto"
OTHER_POLICIES = ("foresight", "unified")
# What Pointsman is named with where it admits sessions by its setting.
ADMISSION = "+admission"
# What is not on the board, and why.
ABSENT: Mapping[str, str] = {
    "production-stack": "it has no package: the name of its router, vllm-router, is on PyPI that of the Rust router above. It is "
    "installed from a checkout of its repository, or runs as an image",
}


@dataclass(frozen=True)
class LaunchContext:
    """What a router is started with. `ports` are free ones; the first is the port that clients send to."""

    engines: Sequence[EngineAddress]  # all that the router is to use, running
    ports: Sequence[object]
    folder: Path  # for files and state of the router; need not exist if only command lines are wanted
    model: str  # name that the engines serve
    tokenizer: Path  # folder with the engines' tokenizer files
    block_size: int  # tokens of a KV block
    kv_blocks: int  # KV blocks of each engine
    context: int  # maximum tokens of a prompt with its answer

    @property
    def urls(self) -> list[str]:
        """The engines' base URLs."""
        return [engine.url for engine in self.engines]


@dataclass(frozen=True)
class Part:
    """One program of a router. `counted`: whether its CPU time is the router's."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    counted: bool = True


@dataclass(frozen=True)
class Contender:
    """A router on the board. `parts` returns its programs, with the files that they need written. `check` raises NotRunnable if
    they cannot run here."""

    name: str  # product and policy, as on the page
    version: str  # of Pointsman the commit; empty: unknown
    check: Callable[[], object]
    parts: Callable[[LaunchContext], Sequence[Part]]
    admits: bool = False  # whether it is there for its admission of sessions
    # Whether its clients name sessions by Dynamo's headers, and send a request at a session's end.
    dynamo_sessions: bool = False

    @property
    def is_pointsman(self) -> bool:
        """Whether it is this project's."""
        return self.name.startswith(POINTSMAN)


def part_label(part: Part, argv: Sequence[str]) -> str:
    """Return the name under which a process of `part` is counted: of `pointsman up` each service by its own name."""
    after = [second for first, second in pairwise(argv) if first == "pointsman_cli.main"]
    return after[0] if after else part.name


def contenders() -> list[Contender]:
    """Return all routers, Pointsman first."""
    commit = git_commit()[:12]
    vllm_router = locked_version("vllm-router")
    return [
        Contender(OWN, commit, _nothing, _pointsman("auto")),
        Contender(f"{OWN}{ADMISSION}", commit, _nothing, _pointsman("auto", admits=True), admits=True),
        *(Contender(f"{POINTSMAN} {policy}", commit, _nothing, _pointsman(policy)) for policy in OTHER_POLICIES),
        *(
            Contender(f"vllm-router {policy}", vllm_router, lambda: environment("vllm-router"), _vllm_router(policy))
            for policy in ("cache_aware", "kv_aware", "consistent_hash")
        ),
        Contender("smg cache_aware", locked_version("smg"), lambda: environment("smg"), _smg),
        Contender(
            "sglang-router cache_aware", locked_version("sglang-router"), lambda: environment("sglang-router"), _sglang
        ),
        Contender("dynamo kv", locked_version(DYNAMO, "ai-dynamo"), lambda: environment(DYNAMO), _dynamo),
        Contender(
            "dynamo thunderagent", locked_version(DYNAMO, "ai-dynamo"), lambda: environment(DYNAMO), _thunderagent,
            admits=True, dynamo_sessions=True,
        ),
        Contender("nginx least_conn", _nginx_version(), _nginx_program, _nginx),
    ]  # fmt: skip


def _nothing() -> None:
    """Pointsman runs in the environment of this process."""


def _pointsman(policy: str, *, admits: bool = False) -> Callable[[LaunchContext], Sequence[Part]]:
    env = {"POINTSMAN_ROUTER_SESSION_ADMISSION": "true"} if admits else {}

    def parts(launch: LaunchContext) -> Sequence[Part]:
        flags = {
            "engine": launch.urls,
            "listen": f"127.0.0.1:{launch.ports[0]}",
            "router-listen": f"127.0.0.1:{launch.ports[1]}",
            "router-metrics": "",
            "agent-metrics": "",
            "console": "",
            "policy": policy,
            "state-dir": launch.folder / "agent",
        }
        return [Part("up", pointsman_command("up", *flag_words(flags)), env)]

    return parts


def _vllm_router(policy: str) -> Callable[[LaunchContext], Sequence[Part]]:
    def parts(launch: LaunchContext) -> Sequence[Part]:
        argv = [str(environment("vllm-router") / "vllm-router"), "--host", "127.0.0.1", "--port", str(launch.ports[0])]
        argv += ["--worker-urls", *launch.urls, "--policy", policy]
        if policy == "kv_aware":
            for engine in launch.engines:
                argv += ["--kv-event-source", f"{engine.url}={engine.events}"]
                argv += ["--kv-event-replay-source", f"{engine.url}={engine.replay}"]
            argv += ["--kv-event-block-size", str(launch.block_size), "--kv-event-model", launch.model]
        return [Part("router", [*argv, "--log-level", "warning", "--prometheus-port", str(launch.ports[1])])]

    return parts


def _smg(launch: LaunchContext) -> Sequence[Part]:
    argv = [str(environment("smg") / "smg"), "launch", "--host", "127.0.0.1", "--port", str(launch.ports[0])]
    argv += ["--worker-urls", *launch.urls, "--policy", "cache_aware", "--disable-tokenizer-autoload"]
    return [Part("router", [*argv, "--log-level", "warn", "--prometheus-port", str(launch.ports[1])])]


def _sglang(launch: LaunchContext) -> Sequence[Part]:
    argv = [str(environment("sglang-router") / "python"), "-m", "sglang_router.launch_router", "--host", "127.0.0.1"]
    argv += ["--port", str(launch.ports[0]), "--worker-urls", *launch.urls, "--policy", "cache_aware"]
    return [Part("router", [*argv, "--log-level", "warn", "--prometheus-port", str(launch.ports[1])])]


def _dynamo(launch: LaunchContext) -> Sequence[Part]:
    """Dynamo's front end with its KV router."""
    argv = [*_front_end(launch), "--router-mode", "kv", "--kv-cache-block-size", str(launch.block_size)]
    argv += ["--router-min-initial-workers", str(len(launch.engines))]
    return [*_dynamo_workers(launch, launch.model), Part("front end", argv, _dynamo_env(launch))]


def _thunderagent(launch: LaunchContext) -> Sequence[Part]:
    """Dynamo's ThunderAgent router behind its front end. The workers register another model, so that the front end sends all
    requests to the router: workers of dynamo.common.backend do not have its README's `--endpoint-types none`."""
    argv = [
        str(environment(DYNAMO) / "python"),
        "-m",
        "dynamo.thunderagent_router",
        "--endpoint",
        "dynamo.backend.generate",
    ]
    argv += ["--model-name", launch.model, "--model-path", str(dynamo_model(launch))]
    argv += ["--router-block-size", str(launch.block_size)]
    env = _dynamo_env(launch)
    front_end = [*_front_end(launch), "--router-mode", "round-robin"]
    return [
        *_dynamo_workers(launch, f"{launch.model}-workers"),
        Part("thunderagent", argv, env),
        Part("front end", front_end, env),
    ]


def _front_end(launch: LaunchContext) -> list[str]:
    python = str(environment(DYNAMO) / "python")
    return [python, "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(launch.ports[0])]


def _dynamo_env(launch: LaunchContext) -> Mapping[str, str]:
    return {
        "DYN_FILE_KV": str(launch.folder / "dynamo"), "DYN_DISCOVERY_BACKEND": "file", "DYN_EVENT_PLANE": "zmq",
        "DYN_LOG": "warn", "DYN_TCP_RPC_HOST": "127.0.0.1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": "",
    }  # fmt: skip


def _dynamo_workers(launch: LaunchContext, registered: str) -> list[Part]:
    """Return workers that pass requests on to the engines; their CPU time is not the router's. `registered`: the model's
    name at the front end."""
    python, worker = str(environment(DYNAMO) / "python"), str(Path(__file__).with_name("dynamo_worker.py"))
    shape = [
        "--block-size",
        str(launch.block_size),
        "--kv-blocks",
        str(launch.kv_blocks),
        "--context",
        str(launch.context),
    ]
    shape += ["--model", str(dynamo_model(launch)), "--served", launch.model, "--registered", registered]
    return [
        Part(
            "adapters", [python, worker, "--engine", engine.url, "--events", engine.events, *shape], _dynamo_env(launch),
            counted=False,
        )
        for engine in launch.engines
    ]  # fmt: skip


def dynamo_model(launch: LaunchContext) -> Path:
    """Return a folder with the engines' tokenizer and a config.json, which Dynamo reads too."""
    folder = launch.folder / "dynamo-model"
    if launch.folder.exists() and not folder.exists():
        folder.mkdir()
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(launch.tokenizer / name, folder / name)
        end = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
        ids = {token["content"]: token["id"] for token in end}
        config = {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "max_position_embeddings": launch.context,
        }
        (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": ids["<|im_end|>"]}))
    return folder


_NGINX = """
daemon off; worker_processes 1; pid {folder}/nginx.pid; error_log {folder}/nginx-error.log;
events {{ worker_connections 8192; }}
http {{
  access_log off; client_body_temp_path {folder}; proxy_temp_path {folder}; fastcgi_temp_path {folder};
  uwsgi_temp_path {folder}; scgi_temp_path {folder}; client_max_body_size 64m; client_body_buffer_size 2m;
  upstream engines {{ least_conn; {servers} keepalive 2048; }}
  server {{
    listen 127.0.0.1:{port} backlog=8192;
    location / {{
      proxy_pass http://engines; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
      proxy_read_timeout 1h;
    }}
  }}
}}
"""


def _nginx(launch: LaunchContext) -> Sequence[Part]:
    config = launch.folder / "nginx.conf"
    servers = "".join(f"server {url.removeprefix('http://')};" for url in launch.urls)
    if launch.folder.exists():
        config.write_text(_NGINX.format(folder=launch.folder, servers=servers, port=launch.ports[0]))
        # nginx's worker runs as another user.
        launch.folder.chmod(0o755)
    return [Part("nginx", [_nginx_program(), "-c", str(config), "-e", str(launch.folder / "nginx-error.log")])]


def _nginx_program() -> str:
    found = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if found is None:
        raise NotRunnable("Debian's nginx is not installed")
    return found


def _nginx_version() -> str:
    try:
        version = subprocess.run([_nginx_program(), "-v"], capture_output=True, text=True, check=False).stderr
    except NotRunnable:
        return ""
    return "".join(re.findall(r"nginx/(\S+)", version)[:1])


def shown_command(contender: Contender) -> str:
    """Return the command lines of a contender for the page, with placeholders for addresses and folders."""
    launch = LaunchContext(
        [EngineAddress("URL", "EVENTS", "REPLAY")],
        ["PORT", "PORT"],
        Path("FOLDER"),
        "MODEL",
        Path("TOKENIZER"),
        16,
        0,
        0,
    )
    lines = dict.fromkeys(" ".join(_shown(word) for word in part.argv) for part in contender.parts(launch))
    return "\n".join(lines)


def _shown(word: str) -> str:
    """Return a word of a command line without the folders of this machine."""
    if word == sys.executable or word.startswith(("/", ".")):
        return Path(word).name
    return word or '""'

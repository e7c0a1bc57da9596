"""The commands of docs/gateway-api.md that need no cluster, run as written: a real Envoy before `pointsman up`."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.docs.page_run import run_page
from tests.support.docs.shell_blocks import blocks_of
from tests.support.processes.process import free_port
from tests.support.repository import REPOSITORY

PORTS = ("8000", "8001", "8080", "9002", "9901", "10000", "50051", "9100", "9101", "9102")


def test_the_pages_commands_put_an_envoy_before_a_fleet(tmp_path: Path) -> None:
    ports = {port: str(free_port()) for port in PORTS}
    blocks = [block for block in blocks_of(REPOSITORY / "docs/gateway-api.md") if "cluster" not in block.marks]
    commands = [command for block in blocks for command in block.commands]
    assert commands[:2] == ["make env env-envoy", 'export PATH="$PWD/.venv/bin:$PATH"']
    swap = re.compile(rf"(?<![\w.])({'|'.join(ports)})\b")
    text = swap.sub(lambda found: ports[found[1]], "\n".join(commands[2:]))
    envoy = tmp_path / "deploy/envoy"
    envoy.mkdir(parents=True)
    config = (REPOSITORY / "deploy/envoy/envoy.yaml").read_text()
    (envoy / "envoy.yaml").write_text(swap.sub(lambda found: ports[found[1]], config))
    (tmp_path / ".venv-envoy").symlink_to(REPOSITORY / ".venv-envoy")
    environment = {
        "POINTSMAN_ROUTER": f"127.0.0.1:{ports['50051']}",
        "POINTSMAN_GATEWAY": f"http://127.0.0.1:{ports['8080']}",
        "POINTSMAN_UP_LISTEN": f"127.0.0.1:{ports['8080']}",
        "POINTSMAN_UP_ROUTER_LISTEN": f"127.0.0.1:{ports['50051']}",
        "POINTSMAN_UP_ROUTER_METRICS": f"127.0.0.1:{ports['9100']}",
        "POINTSMAN_UP_AGENT_METRICS": f"127.0.0.1:{ports['9101']}",
        "POINTSMAN_UP_CONSOLE": f"127.0.0.1:{ports['9102']}",
    }
    log = run_page(f"{text}\necho '=== the end'\nkill $(jobs -p)\nwait\n", tmp_path, environment)
    assert '"object":"list"' in log, log
    assert "server: envoy" in log, log
    assert "x-pointsman-instance: 127.0.0.1:" in log, log
    assert "data: [DONE]" in log, log
    assert f"proxies ask it on port {ports['9002']}" in log, log
    assert "FAIL" not in log, log
    assert re.search(r"vm-\w+-\d+ .*\bone\b.*\bOK\b|-\d+\s+\S+\s+one\s", log), log

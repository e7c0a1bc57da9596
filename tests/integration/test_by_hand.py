"""The commands of docs/by_hand.md, run as written, start a fleet that answers, also after one of its routers has died."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.docs.page_run import run_page
from tests.support.docs.shell_blocks import blocks_of
from tests.support.processes.process import free_port
from tests.support.repository import REPOSITORY

PORTS = ("50051", "50052", "6379", "8000", "8001", "8080", "9100", "9101", "9102", "9110", "9112")
# Run after the page's last command. Whether or not the killed router owned the model, the other one answers.
AFTERWARDS = """
echo "=== one router is gone"
kill -KILL %?router-0
for _ in $(seq 60); do
  if curl --silent --fail -H "Authorization: Bearer $key" -H 'Content-Type: application/json' GATEWAY/v1/chat/completions \
    -d '{"model": "pointsman-emulated", "messages": [{"role": "user", "content": "Again"}], "max_tokens": 8}'; then break; fi
  sleep 0.5
done
echo "=== the end"
kill $(jobs -p)
wait
"""


def test_the_pages_commands_make_a_fleet_that_outlives_a_router(tmp_path: Path) -> None:
    ports = {port: str(free_port()) for port in PORTS}
    commands = [command for block in blocks_of(REPOSITORY / "docs/by_hand.md") for command in block.commands]
    assert commands[:2] == ["make env", 'export PATH="$PWD/.venv/bin:$PATH"']
    page = "\n".join(commands[2:])
    assert set(re.findall(r"(?:127\.0\.0\.1:|--port )(\d+)", page)) <= set(ports)
    text = re.sub(rf"\b({'|'.join(ports)})\b", lambda found: ports[found[1]], page)
    gateway = f"127.0.0.1:{ports['8080']}"
    (tmp_path / "deploy").symlink_to(REPOSITORY / "deploy")
    environment = {
        "POINTSMAN_ROUTER": f"127.0.0.1:{ports['50051']}",
        "POINTSMAN_GATEWAY": f"http://{gateway}",
        "POINTSMAN_GATEWAY_LISTEN": gateway,
        "POINTSMAN_AGENT_METRICS_LISTEN": f"127.0.0.1:{ports['9101']}",
    }
    log = run_page(f"{text}\n{AFTERWARDS.replace('GATEWAY', f'http://{gateway}')}", tmp_path, environment)
    before, _, after = log.partition("=== one router is gone")
    assert len(re.findall(r"pointsman-emulated\s+READY", before)) == 2, log
    assert '"object": "chat.completion"' in before, log
    assert "FAIL" not in before, log
    assert '"object": "chat.completion"' in after.partition("=== the end")[0], log

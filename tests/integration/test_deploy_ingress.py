"""nginx, configured by the Ingress's annotations, passes answers on as they arrive and bodies as long as the gateway accepts."""

from __future__ import annotations

import asyncio
import io
import json
import os
import shutil
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support.certificates import Authority
from tests.support.fakes.gateway_peers import stack
from tests.support.gateway_requests import CHAT
from tests.support.processes.process import Process, free_port
from tests.support.waiting import eventually
from tools import check_deploy

NGINX = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
pytestmark = pytest.mark.skipif(NGINX is None, reason="needs nginx (apt-get install nginx)")

PREFIX = "nginx.ingress.kubernetes.io/"
CONFIGURATION = """\
daemon off; user root; worker_processes 1; pid {folder}/pid; error_log stderr;
events {{ }}
http {{
  access_log off;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u;
  scgi_temp_path {folder}/s;
  server {{
    listen 127.0.0.1:{port} ssl; ssl_certificate {cert}; ssl_certificate_key {key};
    {locations}
    location / {{ return 404; }}
  }}
}}
"""


def directives(annotations: dict[str, str]) -> str:
    """Return what ingress-nginx writes into a location for annotations that are named after nginx directives."""
    lines = ["proxy_http_version 1.1;", 'proxy_set_header Connection "";', "proxy_set_header Host $host;"]
    for name, value in annotations.items():
        directive = name.removeprefix(PREFIX).replace("-", "_").replace("proxy_body_size", "client_max_body_size")
        lines.append(f"{directive} {value}{'s' if directive.endswith('_timeout') else ''};")
    return " ".join(lines)


@asynccontextmanager
async def nginx(folder: Path, gateway: str) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of an nginx in front of the gateway, configured as the rendered Ingress says."""
    objects = check_deploy.render(check_deploy.DEPLOY / "k8s/overlays/gpu", "ingress")
    [ingress] = [resource for resource in objects if resource["kind"] == "Ingress"]
    annotated = directives(ingress["metadata"]["annotations"])
    paths = [path["path"] for rule in ingress["spec"]["rules"] for path in rule["http"]["paths"]]
    authority = Authority(folder / "authority")
    certificate, port = authority.sign("gateway"), free_port()
    locations = "\n    ".join(f"location {path} {{ proxy_pass {gateway}; {annotated} }}" for path in paths)
    file = folder / "nginx.conf"
    names: dict[str, Any] = {"folder": folder, "port": port, "cert": certificate.cert, "key": certificate.key}
    file.write_text(CONFIGURATION.format(locations=locations, **names))
    process = Process("nginx", [str(NGINX), "-c", str(file), "-e", "stderr"], folder / "nginx.log")
    process.start()
    trusted = ssl.create_default_context(cafile=authority.ca)
    try:
        async with aiohttp.ClientSession(
            f"https://127.0.0.1:{port}", connector=aiohttp.TCPConnector(ssl=trusted)
        ) as client:

            async def listens() -> bool:
                assert process.alive, process.tail()
                try:
                    async with client.get("/v1/models") as answer:
                        return answer.status == 200
                except aiohttp.ClientError:
                    return False

            await eventually(listens, "nginx before the gateway")
            yield client
    finally:
        process.stop()


async def test_nginx_as_the_ingress_tells_it_streams_and_takes_long_prompts(tmp_path: Path) -> None:
    async with stack(tmp_path, engines=1) as up, nginx(tmp_path, up.url) as client:
        up.engines[0].hold = asyncio.Event()
        async with client.post("/v1/chat/completions", json={**CHAT, "stream": True}) as answer:
            text = b""
            # The engine sends no more until `hold` is set.
            while b"The " not in text:
                text += await answer.content.readany()
            up.engines[0].hold.set()
            text += await answer.content.read()
        assert text.endswith(b"data: [DONE]\n\n")
        # More than nginx accepts by default: the refusal is the gateway's.
        long = {**CHAT, "messages": [{"role": "user", "content": "word " * 500_000}], "max_tokens": -1}
        body, kind = io.BytesIO(json.dumps(long).encode()), {"Content-Type": "application/json"}
        async with client.post("/v1/chat/completions", data=body, headers=kind) as answer:
            assert (answer.status, "max_tokens" in (await answer.json())["error"]["message"]) == (400, True)
        for path in ("/metrics", "/health"):
            async with client.get(path) as answer:
                assert answer.status == 404

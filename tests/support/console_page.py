"""The console's page in a headless Chromium, served by a router with a small fleet."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from playwright.async_api import Page, Request, async_playwright, expect

from pointsman.agent.v1 import agent_pb2
from pointsman.router.v1 import placement_pb2
from pointsman_common.io.channel import open_channel
from pointsman_common.io.settings import Tokens
from pointsman_router.io.main import RouterServer
from tests.support.router import Client, Report, Session, running

# Names from outside must not be rendered as markup. Each fleet here has an instance and a session with this name.
EVIL = "<img src=x onerror=document.title='owned'>"
# Timeout of Playwright's actions and expectations, ms.
WITHIN_MS = 30_000
expect.set_options(timeout=WITHIN_MS)


class Shown:
    """A console page in a browser. `wrongs` lists its faults: console errors, requests to other hosts, tokens in URLs."""

    def __init__(self, page: Page, server: RouterServer) -> None:
        assert server.console is not None
        self.page = page
        self.server = server
        self.address = server.console.address
        self.wrongs: list[str] = []
        page.on(
            "console",
            lambda message: self.wrongs.append(message.text) if message.type in ("error", "warning") else None,
        )
        page.on("pageerror", lambda error: self.wrongs.append(str(error)))
        page.on("request", self._requested)
        page.set_default_timeout(WITHIN_MS)

    def _requested(self, request: Request) -> None:
        if not request.url.startswith(self.address + "/"):
            self.wrongs.append(f"a request to {request.url}")
        if "token" in request.url:
            self.wrongs.append(f"a token in {request.url}")

    async def open(self, view: str) -> None:
        await self.page.goto(f"{self.address}/#/{view}")

    async def sign_in(self, token: str) -> None:
        await self.page.get_by_role("button", name="Sign in").click()
        await self.page.get_by_label("Token").fill(token)
        await self.page.keyboard.press("Enter")


@asynccontextmanager
async def browser(instances: int = 3, scheme: Any = "light", roles: bool = False) -> AsyncIterator[Shown]:
    """Start a fleet with one answered request of session s1, and open its console in Chromium."""
    executable = shutil.which("chromium") or shutil.which("google-chrome")
    assert executable, "this test needs Debian's chromium"
    tokens = Tokens(
        agent_token="agents" if roles else "",
        gateway_token="gateways" if roles else "",
        operator_token="operators" if roles else "",
        token_dir=None,
    )
    async with AsyncExitStack() as stack:
        # Chromium does not run its sandbox as root. It opens only this page here.
        playwright = await stack.enter_async_context(async_playwright())
        chromium = await playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        stack.push_async_callback(chromium.close)
        server, client = await stack.enter_async_context(running(tokens, console_listen="127.0.0.1:0"))
        channel = await stack.enter_async_context(open_channel(f"127.0.0.1:{server.port}"))
        await a_fleet(Client(channel, tokens.of("agent")), client, instances)
        await a_request(client)
        page = await chromium.new_page(color_scheme=scheme, viewport={"width": 1440, "height": 900})
        yield Shown(page, server)


async def a_fleet(agents: Client, observer: Client, instances: int) -> None:
    names = [f"10.0.{number // 100}.{number % 100}:8000" for number in range(instances - 1)]
    for number, name in enumerate([*names, EVIL]):
        report = Report(agents, observer)
        await report.join(name, keys=[1, 2, 3], incarnation=f"life-{number}")
        usage = number / instances
        await report.send(load=agent_pb2.Load(healthy=True, running=number, kv_usage=usage))


async def a_request(client: Client) -> None:
    gateway = Session(client)
    await gateway.hello()
    for session in ("s1", EVIL):
        lineage = {"agent_id": session, "agent_parent_session_id": f"parent of {session}"}
        await gateway.place(f"request-of-{session}", 30_000, session_id=session, tenant="t", keys=[1, 2], **lineage)
    await gateway.finish("request-of-s1", cached_tokens=32, timings=placement_pb2.Timings(first_token_ms=120.0))


# Returns the texts whose contrast with their background is below 4.5.
CONTRAST = """() => {
    const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    const rgba = (colour) => {
        canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
        const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
        return [r, g, b, a / 255];
    };
    const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
        .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
        .reduce((sum, c, at) => sum + c * [0.2126, 0.7152, 0.0722][at], 0);
    const ground = (node) => {
        for (let one = node; one; one = one.parentElement) {
            const colour = rgba(getComputedStyle(one).backgroundColor);
            if (colour[3] === 1) return colour;
        }
        return [255, 255, 255, 1];
    };
    const found = [];
    for (const node of document.querySelectorAll("body *")) {
        const own = [...node.childNodes].some((one) => one.nodeType === 3 && one.data.trim());
        if (!own || !node.checkVisibility() || node.closest(".unseen, :disabled, noscript")) continue;
        const [a, b] = [light(rgba(getComputedStyle(node).color)), light(ground(node))].sort((x, y) => y - x);
        const ratio = (a + 0.05) / (b + 0.05);
        if (ratio < 4.5) found.push(`${ratio.toFixed(2)}: ${node.tagName} ${node.className} ${node.textContent.slice(0, 30)}`);
    }
    return found;
}"""

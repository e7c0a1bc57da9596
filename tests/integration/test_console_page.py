"""The console's page in a headless Chromium: in both colour schemes, by keyboard, with a big fleet, by role, in trouble."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from playwright.async_api import Page, Request, async_playwright, expect

from pointsman.agent.v1 import agent_pb2
from pointsman.common.io.channel import open_channel
from pointsman.common.io.settings import Tokens
from pointsman.router.io.main import RouterServer
from pointsman.router.v1 import placement_pb2
from tests.support.router import Client, Report, Session, running

# Nobody's markup may come to life: an instance and a session of these names are in every fleet here.
EVIL = "<img src=x onerror=document.title='owned'>"
VIEWS = ("fleet", "decisions", "sessions", "outcomes", "replicas")
WITHIN_MS = 15_000
expect.set_options(timeout=WITHIN_MS)


class Shown:
    """A page of one console that is open in a browser, and what it did that it should not."""

    def __init__(self, page: Page, server: RouterServer) -> None:
        assert server.console is not None
        self.page = page
        self.server = server
        self.address = server.console.address
        self.wrongs: list[str] = []
        page.on("console", lambda told: self.wrongs.append(told.text) if told.type in ("error", "warning") else None)
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
    """A fleet with one answered request of session s1, and its console in Chromium."""
    executable = shutil.which("chromium") or shutil.which("google-chrome")
    assert executable, "this test needs Debian's chromium"
    tokens = Tokens(
        agent_token="agents" if roles else "",  # type: ignore[arg-type]
        gateway_token="gateways" if roles else "",  # type: ignore[arg-type]
        operator_token="operators" if roles else "",  # type: ignore[arg-type]
        token_dir=None,
    )
    async with AsyncExitStack() as stack:
        # Chromium refuses its sandbox to root; what it opens here is this page alone.
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
        await gateway.place(f"request-of-{session}", tokens=30_000, session_id=session, tenant="t", keys=[1, 2])
    await gateway.finish("request-of-s1", cached_tokens=32, timings=placement_pb2.Timings(first_token_ms=120.0))


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


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_every_view_is_readable_and_asks_nobody_else(scheme: str) -> None:
    async with browser(scheme=scheme) as shown:
        for view in VIEWS:
            await shown.open(view)
            await expect(shown.page.get_by_role("heading", level=1)).to_have_text(view.capitalize())
            await expect(shown.page.locator("tbody tr").first).to_be_visible()
            assert await shown.page.evaluate(CONTRAST) == [], view
        ground = await shown.page.evaluate("getComputedStyle(document.body).backgroundColor")
        red = int(ground.removeprefix("rgb(").split(",")[0])
        assert red > 200 if scheme == "light" else red < 60
        await shown.open("fleet")
        await expect(shown.page.get_by_role("link", name=EVIL)).to_be_visible()
        await shown.open("decisions")
        await shown.page.get_by_role("row").filter(has_text=EVIL).get_by_role("link").first.click()
        await expect(shown.page.get_by_role("heading", level=1)).to_contain_text(f"Why request-of-{EVIL} went to")
        await expect(shown.page.locator("#others tbody tr").nth(10)).to_be_visible()
        assert await shown.page.evaluate(CONTRAST) == []
        assert "owned" not in await shown.page.title()
        assert shown.wrongs == []


async def test_by_keyboard_alone_to_the_why_of_a_decision_and_back() -> None:
    async with browser() as shown:
        await shown.open("fleet")
        await expect(shown.page.locator("tbody tr")).to_have_count(3)
        keyboard = shown.page.keyboard

        async def tab_to(what: str) -> None:
            for _ in range(40):
                await keyboard.press("Tab")
                if await shown.page.evaluate("document.activeElement.textContent") == what:
                    return
            pytest.fail(f"no way to {what!r} by Tab")

        await tab_to("Decisions")
        await keyboard.press("Enter")
        await expect(shown.page.get_by_role("heading", level=1)).to_be_focused()
        time = await shown.page.locator("tbody tr").nth(0).locator("a").inner_text()
        await tab_to(time)
        await keyboard.press("ArrowDown")
        await expect(shown.page.locator("tbody tr").nth(1).locator("a")).to_be_focused()
        await keyboard.press("Enter")
        heading = shown.page.get_by_role("heading", level=1)
        await expect(heading).to_contain_text("Why request-of-s1 went to")
        await expect(heading).to_be_focused()
        candidates = shown.page.get_by_role("table", name="Candidates")
        await expect(candidates.locator("tbody tr")).to_have_count(3)
        await expect(candidates.locator("tbody tr").first).to_contain_text("chosen")
        await expect(shown.page.get_by_text("32 tok (0 to the prediction)")).to_be_visible()
        policies = shown.page.get_by_role("table", name="Other policies")
        await expect(policies.get_by_role("row").filter(has_text="round_robin")).to_contain_text(
            "Each instance in turn."
        )
        await keyboard.press("Escape")
        await expect(heading).to_have_text("Decisions")
        await keyboard.press("/")
        await keyboard.type("s1")
        await keyboard.press("Enter")
        await expect(shown.page.locator("tbody tr")).to_have_count(1)
        assert shown.wrongs == []


async def test_500_instances_are_paged_sorted_and_changed_in_place() -> None:
    async with browser(instances=500) as shown:
        await shown.open("fleet")
        page, rows = shown.page, shown.page.locator("tbody tr")
        await expect(rows).to_have_count(100)
        await expect(page.get_by_text("1–100 of 500")).to_be_visible()
        await page.evaluate("document.querySelectorAll('tbody tr').forEach((row) => { row.seen = true; })")
        before = await rows.first.text_content() or ""
        await expect(rows.first).not_to_have_text(before)
        assert await page.evaluate("[...document.querySelectorAll('tbody tr')].every((row) => row.seen)")
        await page.get_by_role("button", name="Next").click()
        await expect(page.get_by_text("101–200 of 500")).to_be_visible()
        await page.get_by_role("button", name="KV used").click()
        await expect(rows.first).to_contain_text(EVIL)
        await page.get_by_role("button", name="KV used").click()
        await expect(rows.first).to_contain_text("10.0.0.0:8000")
        await page.get_by_role("searchbox").fill("10.0.3. ready")
        await expect(rows).to_have_count(100)
        await expect(page.get_by_text("100 of 500")).to_be_visible()
        await page.get_by_role("searchbox").fill("nonsense")
        await expect(page.get_by_text("Nothing matches the filter.")).to_be_visible()
        await shown.open("decisions")
        await page.get_by_role("row").filter(has_text="s1").get_by_role("link").first.click()
        await expect(page.get_by_text("which had most of the prompt or the least to do, of 500")).to_be_visible()
        assert shown.wrongs == []


async def test_a_gateways_token_may_look_and_an_operators_may_act() -> None:
    async with browser(roles=True) as shown:
        page = shown.page
        await shown.open("fleet")
        await expect(page.get_by_text("Sign in with an operator's or a gateway's token")).to_be_visible()
        await shown.sign_in("wrong")
        await expect(page.get_by_text("No role has this token.")).to_be_visible()
        await page.keyboard.press("Escape")
        await shown.sign_in("gateways")
        await page.get_by_role("link", name="10.0.0.0:8000").click()
        await expect(page.get_by_role("button", name="Drain")).to_be_disabled()
        await expect(page.get_by_role("button", name="policy unified")).to_be_disabled()
        await page.get_by_role("button", name="Sign out (gateway)").click()
        await expect(page.get_by_text("10.0.0.0:8000")).to_have_count(0)
        await shown.sign_in("operators")
        await page.get_by_role("button", name="Drain").click()
        await page.get_by_role("dialog").get_by_role("button", name="Drain").click()
        await expect(page.get_by_role("status")).to_have_text("10.0.0.0:8000 is draining.")
        await expect(page.locator(".facts").first).to_contain_text("draining")
        await page.get_by_role("button", name="policy unified").click()
        await page.get_by_role("dialog").get_by_role("combobox").select_option("lmetric")
        await page.get_by_role("dialog").get_by_role("button", name="Change").click()
        await expect(page.get_by_role("button", name="policy lmetric")).to_be_visible()
        assert shown.server.router.state.policy.name == "lmetric"
        # The token was not to be kept: who loads the page anew has none.
        assert await page.evaluate("JSON.stringify([localStorage, sessionStorage, document.cookie])") == '[{},{},""]'
        await page.reload()
        await expect(page.get_by_role("button", name="Sign in")).to_be_visible()
        assert shown.wrongs == []


async def test_a_page_says_what_only_another_router_knows() -> None:
    async with browser() as shown:
        replicas = {
            "thisReplica": {"routerId": "one"},
            "replicas": [
                {"routerId": "one", "policy": {"name": "unified"}},
                {
                    "routerId": "two",
                    "heartbeatAge": "0.1s",
                    "policy": {"name": "lmetric"},
                    "consoleUrl": "http://127.0.0.1:1",
                },
            ],
            "pools": [
                {"model": "m", "owner": {"routerId": "two", "address": "two:1"}},
                {"model": "n", "owner": {"routerId": "one"}},
            ],
        }
        await shown.page.route("**/api/ListReplicas", lambda route: route.fulfill(json=replicas))
        await shown.open("fleet")
        elsewhere = shown.page.locator("#elsewhere")
        await expect(elsewhere).to_contain_text("This is what one sees, one router of 2.")
        await expect(elsewhere).to_contain_text("Placed by another router")
        await expect(elsewhere).to_contain_text("m by two (two:1)")
        await expect(elsewhere.get_by_role("link", name="two (two:1)")).to_have_attribute("href", "http://127.0.0.1:1")
        await expect(elsewhere).to_contain_text("do not place by the same policy")
        assert await shown.page.evaluate(CONTRAST) == []
        await elsewhere.get_by_role("link", name="See Replicas").click()
        await expect(shown.page.get_by_role("table", name="Routers")).to_contain_text("lmetric")
        # Of a decision that another one made, and of an address that was cut short.
        for gone in ("two-1", "cut%2"):
            await shown.open(f"decisions/{gone}")
            await expect(shown.page.get_by_role("heading", name=f"Decision {gone}")).to_be_visible()
            await expect(shown.page.get_by_text("It is not in this router's log")).to_be_visible()


async def test_what_is_old_looks_old_when_the_router_is_gone() -> None:
    async with browser() as shown:
        await shown.open("fleet")
        await expect(shown.page.locator("tbody tr")).to_have_count(3)
        assert shown.server.console is not None
        await shown.server.console.stop()
        await expect(shown.page.get_by_role("alert")).to_contain_text("What you see is")
        await expect(shown.page.locator("body")).to_have_attribute("data-stale", "true")
        await expect(shown.page.locator("tbody tr")).to_have_count(3)

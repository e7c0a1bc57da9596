"""The console's page in a headless Chromium: in both colour schemes, by keyboard, with a big fleet, by role, in trouble."""

from __future__ import annotations

import asyncio
import time

import pytest
from playwright.async_api import Route, expect

from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.instances.absent_engines import AbsentEngine
from pointsman_router.core.instances.instance_orders import OrderChange
from pointsman_router.core.placement_types import PlacementRequest
from pointsman_router.core.policy.reasons import REASONS, ROUTE_CLASSES, explained
from pointsman_router.core.policy.registry import DEFAULT_POLICY
from tests.support.console_page import CONTRAST, EVIL, browser
from tests.support.router_past import give_past

VIEWS = ("fleet", "history", "decisions", "sessions", "outcomes", "replicas")


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_every_view_is_readable_and_asks_nobody_else(scheme: str) -> None:
    async with browser(scheme=scheme) as shown:
        give_past(shown.server.router)
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


async def test_figures_are_shown_as_large_as_they_are() -> None:
    shown_as = {
        0.5: "0.5",
        100.5: "100.5",
        12_345.678: "12345.7",
        99_999.99: "100,000",
        2.0**-33: "1.164e-10",
        1e-10: "1e-10",
    }
    async with browser(instances=1) as shown:
        await shown.open("fleet")
        shown_figures = "(values) => import('/format.js').then(({ figure }) => values.map(figure))"
        assert await shown.page.evaluate(shown_figures, list(shown_as)) == list(shown_as.values())


# Elements that are wider than their container: tables, and the page itself.
OVERFLOW = """() => [...document.querySelectorAll(".scroll, html")].filter((one) => one.scrollWidth > one.clientWidth)
    .map((one) => `${one.getAttribute("aria-label") ?? "the page"}: ${one.scrollWidth} in ${one.clientWidth} px`)"""
SMALL_SCREENS = (1400, 1280)
MANY = 8_888_888
GROUP = {
    "routeClass": "ROUTE_CLASS_MEDIUM",
    "mode": "PLACEMENT_MODE_OFFLOAD",
    "reason": "prefill_idle_decode_busy",
    "decided": 10_000,  # the largest count
    "outcomes": [
        {"outcome": f"DECISION_OUTCOME_{name}", "decided": 8_888}
        for name in ("OK", "CANCELLED", "REJECTED", "FAILED", "OPEN", "UNKNOWN")
    ],
    **dict.fromkeys(("fellBack", "held"), 8_888),
    **dict.fromkeys(("reportedInputTokens", "predictedCachedTokens", "reportedCachedTokens", "inputTokens"), str(MANY)),
    **dict.fromkeys(("ttftP50", "ttftP95"), "0.888s"),
}


async def as_if_busy(route: Route) -> None:
    """Answer with the fleet, but with large figures and every optional field of its instances."""
    answer = await (await route.fetch()).json()
    for number, instance in enumerate(answer["instances"]):
        instance |= dict.fromkeys(("pendingPrefillTokens", "ongoingDecodeTokens", "keys"), str(MANY))
        instance |= {"numRequests": 8_888, "sessions": 8_888, "stale": True, "weight": 0.25}
        instance |= {
            "prefixSource": "PREFIX_SOURCE_APPROXIMATE",
            "differences": ["dtype: bfloat16, not float16"] * number,
        }
        instance |= {"state": "INSTANCE_STATE_CORDONED", "underlyingState": "INSTANCE_STATE_UNHEALTHY"}
        instance["instance"] |= {"model": f"organisation/Model-480B-A35B-Instruct-FP8-{number}"}
        instance["load"] |= {"running": 8_888, "waiting": 8_888, "kvUsage": 1}
    await route.fulfill(json=answer)


async def test_no_view_is_wider_than_a_small_screen() -> None:
    async with browser() as shown:
        page = shown.page
        give_past(shown.server.router)
        why = f"decisions/{next(shown.server.router.decisions.newest(lambda _: True)).decision.decision_id}"
        for width in SMALL_SCREENS:
            await page.set_viewport_size({"width": width, "height": 900})
            for view in (*VIEWS, "fleet/10.0.0.0:8000", why):
                await shown.open(view)
                await expect(page.locator("tbody tr").first).to_be_visible()
                assert await page.evaluate(OVERFLOW) == [], (view, width)
        await page.route("**/api/ListInstances", as_if_busy)
        await page.route(
            "**/api/SummarizeDecisions", lambda route: route.fulfill(json={"groups": [GROUP], "total": GROUP})
        )
        for width in SMALL_SCREENS:
            await page.set_viewport_size({"width": width, "height": 900})
            for view, column in (("fleet", "Model"), ("outcomes", "Fell back")):
                await shown.open(view)
                await expect(page.get_by_role("columnheader", name=column)).to_be_visible()
                assert await page.evaluate(OVERFLOW) == [], (view, width)
        await expect(page.get_by_role("heading", name="Offloads")).to_be_visible()
        assert shown.wrongs == []


async def test_what_an_operator_asks_first_is_there_and_reasons_in_plain_words() -> None:
    async with browser() as shown:
        page = shown.page
        await shown.open("fleet")
        name = page.get_by_role("rowheader").filter(has_text="10.0.0.0:8000")
        await expect(name).to_have_attribute("title", "m, engine process life-0")
        await expect(page.get_by_role("columnheader", name="Incarnation")).to_have_count(0)
        await shown.open("sessions")
        cells = page.get_by_role("row").filter(has_text="s1").get_by_role("cell")
        await expect(cells.nth(1)).to_have_text("1")
        assert (await cells.all_inner_texts())[1:4] == ["1", "30,000", "30,000"]
        await shown.open("outcomes")
        await expect(page.locator(".tiles dd").first).to_have_text("100.0 %1 of 1 that ended")
        await expect(page.get_by_role("heading", name="Offloads")).to_have_count(0)
        # An outcome that never happened has no column.
        await expect(page.get_by_role("columnheader", name="Failed")).to_have_count(0)
        await expect(page.get_by_role("columnheader", name="Open")).to_have_count(1)
        await shown.open("replicas")
        pools = page.get_by_role("table", name="Pools")
        await expect(pools.get_by_role("row").nth(1)).to_contain_text("3 of 3")
        shown_cells = await page.get_by_role("table", name="Routers").locator("tbody tr > *:visible").all_inner_texts()
        assert shown_cells[1:6] == ["serves this page", "m", "1", "0", "1"]
        assert {"", "–", "unknown", "not shared"}.isdisjoint(shown_cells)
        await shown.open("decisions")
        row = page.get_by_role("row").filter(has_text="s1")
        reason = row.get_by_role("cell", name="least_load_x_work")
        await expect(reason).to_have_attribute("title", REASONS["least_load_x_work"])
        await row.get_by_role("link").first.click()
        await expect(page.locator(".verdict")).to_contain_text(f"chose it: {REASONS['least_load_x_work']}")
        await expect(page.get_by_text(explained("least_load_x_work")).first).to_be_visible()
        await expect(page.get_by_text(f"heavy: {ROUTE_CLASSES['HEAVY']}")).to_be_visible()
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
        await expect(shown.page.get_by_text("32 tok (0 compared with the prediction)")).to_be_visible()
        await expect(shown.page.get_by_role("link", name="parent of s1")).to_be_visible()
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


@pytest.mark.timeout(600)  # A browser draws them: minutes on a busy machine.
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
        seen = "those with the most cached tokens and those with the least load, of 500"
        await expect(page.get_by_text(seen)).to_be_visible()
        assert shown.wrongs == []


async def test_a_gateways_token_may_look_and_an_operators_may_act() -> None:
    async with browser(roles=True) as shown:
        page = shown.page
        await shown.open("fleet")
        await expect(page.get_by_text("Sign in with an operator's, an observer's or a gateway's token")).to_be_visible()
        await shown.sign_in("wrong")
        await expect(page.get_by_text("No role has this token.")).to_be_visible()
        await page.keyboard.press("Escape")
        await shown.sign_in("gateways")
        await page.get_by_role("link", name="10.0.0.0:8000").click()
        await expect(page.get_by_role("button", name="Drain")).to_be_disabled()
        await expect(page.get_by_role("button", name=f"policy {DEFAULT_POLICY}")).to_be_disabled()
        await page.get_by_role("button", name="Sign out (gateway)").click()
        await expect(page.get_by_text("10.0.0.0:8000")).to_have_count(0)
        await shown.sign_in("operators")
        await page.get_by_role("button", name="Drain").click()
        await page.get_by_role("dialog").get_by_role("button", name="Drain").click()
        await expect(page.get_by_role("status")).to_have_text("10.0.0.0:8000 is draining.")
        await expect(page.locator(".facts").first).to_contain_text("draining")
        await page.get_by_role("button", name="Cordon").click()
        await page.get_by_role("dialog").get_by_label("Reason").fill("a new disk")
        await page.get_by_role("dialog").get_by_role("button", name="Cordon").click()
        await expect(page.get_by_role("status")).to_have_text("10.0.0.0:8000 is cordoned.")
        await page.get_by_role("button", name="Weight").click()
        await page.get_by_role("dialog").get_by_label("Weight").fill("0.5")
        await page.get_by_role("dialog").get_by_role("button", name="Change").click()
        await expect(page.locator(".facts").first).to_contain_text("cordoned: a new disk, weight 0.5")
        await page.get_by_role("button", name="Uncordon").click()
        await page.get_by_role("dialog").get_by_role("button", name="Uncordon").click()
        await expect(page.locator(".facts").first).to_contain_text("draining")
        await page.get_by_role("button", name=f"policy {DEFAULT_POLICY}").click()
        await page.get_by_role("dialog").get_by_role("combobox").select_option("lmetric")
        await page.get_by_role("dialog").get_by_role("button", name="Change").click()
        await expect(page.get_by_role("button", name="policy lmetric")).to_be_visible()
        assert shown.server.router.state.policy.name == "lmetric"
        # The user chose not to keep the token, so it is gone after a reload.
        assert await page.evaluate("JSON.stringify([localStorage, sessionStorage, document.cookie])") == '[{},{},""]'
        await page.reload()
        await expect(page.get_by_role("button", name="Sign in")).to_be_visible()
        assert shown.wrongs == []


async def one_answers(route: Route) -> None:
    """Answer with the fleet, of which all instances but the first only produce KV."""
    answer = await (await route.fetch()).json()
    for status in answer["instances"][1:]:
        status["instance"]["kvTransfer"] = {"protocol": "KV_PROTOCOL_NIXL", "role": "KV_ROLE_PRODUCER"}
    await route.fulfill(json=answer)


async def test_the_last_instance_that_answers_is_not_taken_out_without_a_warning() -> None:
    async with browser() as shown:
        page = shown.page
        await page.route("**/api/ListInstances", one_answers)
        for instance, warnings in (("10.0.0.0:8000", 1), ("10.0.0.1:8000", 0)):
            await shown.open(f"fleet/{instance}")
            await expect(page.get_by_role("heading", level=1)).to_contain_text(instance)
            for order in ("Drain", "Cordon"):
                await page.get_by_role("button", name=order).click()
                dialog = page.get_by_role("dialog")
                await expect(dialog).to_contain_text(f"{order} {instance}?")
                await expect(dialog.get_by_text("No other instance of m can answer")).to_have_count(warnings)
                await page.keyboard.press("Escape")
                await expect(dialog).to_have_count(0)
        assert shown.wrongs == []


async def test_an_engine_that_never_answered_is_counted_and_named() -> None:
    async with browser() as shown:
        router, page = shown.server.router, shown.page
        known = len(router.state.instances.records())
        absent = AbsentEngine("absent:8000", "http://absent:8000", f"connection refused {EVIL}", "node-9")
        router.absent_engines.reported("agent", [absent], time.monotonic())
        await shown.open("fleet")
        await expect(page.get_by_text(f"{known} of {known + 1}")).to_be_visible()
        await expect(page.get_by_text("1 absent")).to_be_visible()
        item = page.get_by_role("listitem").filter(has_text="http://absent:8000")
        await expect(item).to_contain_text(f"connection refused {EVIL} (agent on node-9)")
        assert shown.wrongs == []


async def test_an_address_without_a_page_of_its_own_says_so_or_shows_the_list() -> None:
    async with browser() as shown:
        await shown.open("nowhere/at/all")
        await expect(shown.page.get_by_text("There is no page nowhere.")).to_be_visible()
        await shown.open("sessions/any")
        await expect(shown.page.get_by_role("heading", name="Sessions")).to_be_visible()
        assert shown.wrongs == []


async def test_orders_for_instances_that_nobody_reports_are_shown_and_lifted() -> None:
    async with browser(roles=True) as shown:
        router, page = shown.server.router, shown.page
        await router.set_instance_order(OrderChange("gone", 1.0, cordoned=True, reason=EVIL))
        await router.set_instance_order(OrderChange("gone", 1.0, weight=0.5))
        await router.set_instance_order(OrderChange("10.0.0.0:8000", 1.0, weight=0.5))
        await shown.open("fleet")
        await shown.sign_in("operators")
        orders = page.get_by_role("listitem").filter(has_text="gone")
        await expect(orders).to_contain_text(f"cordoned: {EVIL}, weight 0.5")
        await expect(page.get_by_role("button", name="Lift")).to_have_count(1)
        await orders.get_by_role("button", name="Lift").click()
        await page.get_by_role("dialog").get_by_role("button", name="Lift").click()
        await expect(page.get_by_role("status")).to_have_text("All orders for gone are lifted.")
        await expect(orders).to_have_count(0)
        assert [*router.state.instances.orders] == ["10.0.0.0:8000"]
        assert shown.wrongs == []


async def test_who_signs_out_asks_nothing_more() -> None:
    async with browser(roles=True) as shown:
        page = shown.page
        await shown.open("fleet")
        await shown.sign_in("gateways")
        await page.get_by_role("link", name="10.0.0.0:8000").click()
        await expect(page.get_by_role("button", name="Drain")).to_be_disabled()
        asked, signed_out = asyncio.Event(), asyncio.Event()

        async def slow(route: Route) -> None:
            asked.set()
            await signed_out.wait()
            await route.continue_()

        await page.route("**/api/ListInstances", slow)
        await asked.wait()
        # Sign out in the middle of the page's requests of every other second; the rest of them would have no token.
        await page.get_by_role("button", name="Sign out (gateway)").click()
        await expect(page.get_by_text("Sign in with an operator's, an observer's or a gateway's token")).to_be_visible()
        async with page.expect_response("**/api/ListInstances"):
            signed_out.set()
        await page.unroute("**/api/ListInstances", slow)
        await shown.sign_in("operators")
        await expect(page.get_by_role("button", name="Drain")).to_be_enabled()
        await expect(page.locator("#trouble")).to_be_hidden()
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
                    "policyProblem": "no policy 'preble'",
                    "consoleUrl": "http://127.0.0.1:1",
                },
            ],
            "lostReplicas": [{"routerId": "three", "heartbeatAge": "61s"}],
            "policyChanges": [
                {
                    "time": "2026-11-28T10:00:00Z",
                    "model": "n",
                    "name": "unified",
                    "reason": "few_instances",
                    "nameBefore": "foresight",
                    "reasonBefore": "times_predictable",
                }
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
        await expect(elsewhere).to_contain_text("two does not place by the fleet's policy: no policy 'preble'.")
        assert await shown.page.evaluate(CONTRAST) == []
        await elsewhere.get_by_role("link", name="See Replicas").click()
        await expect(shown.page.get_by_role("table", name="Routers")).to_contain_text("lmetric")
        lost = shown.page.get_by_role("table", name="Lost replicas").get_by_role("row").filter(has_text="three")
        await expect(lost).to_contain_text("lost")
        change = (
            shown.page.get_by_role("table", name="Changes of policies").get_by_role("row").filter(has_text="unified")
        )
        await expect(change).to_contain_text("few_instances")
        await expect(change).to_contain_text("foresight (times_predictable")
        assert await shown.page.evaluate(CONTRAST) == []
        # A decision that another router made, and an address that was cut short.
        for gone in ("two-1", "cut%2"):
            await shown.open(f"decisions/{gone}")
            await expect(shown.page.get_by_role("heading", name=f"Decision {gone}")).to_be_visible()
            await expect(shown.page.get_by_text("It is not in this router's log")).to_be_visible()


async def test_what_happened_while_the_stream_was_broken_is_shown_in_order() -> None:
    async with browser() as shown:
        router, console, rows = shown.server.router, shown.server.console, shown.page.locator("tbody tr")
        assert console is not None
        await shown.open("decisions")
        ended = rows.filter(has_text=EVIL)
        await expect(ended.get_by_text("open", exact=True)).to_be_visible()

        def break_streams() -> None:
            for stream in list(console._streams):
                stream.cancel()

        # What follows in the same turn of the event loop is sent over no stream.
        break_streams()
        router.submit(ev.Finished(f"request-of-{EVIL}", "OK"))
        await expect(ended.get_by_text("ok", exact=True)).to_be_visible()
        break_streams()
        # More than the page asks for: what it had is not among them.
        for number in range(250):
            router.submit(ev.PlaceRequested(PlacementRequest(f"r{number}", "m", 100, session_id=f"later-{number}"), ""))
            router.submit(ev.Finished(f"r{number}", "OK"))
        await expect(rows.filter(has_text="later-249")).to_be_visible()
        await expect(rows.first).to_contain_text("later-249")
        assert router.decisions.watched


async def test_what_is_old_looks_old_when_the_router_is_gone() -> None:
    async with browser() as shown:
        await shown.open("fleet")
        await expect(shown.page.locator("tbody tr")).to_have_count(3)
        assert shown.server.console is not None
        await shown.server.console.stop()
        await expect(shown.page.get_by_role("alert")).to_contain_text("What you see is")
        await expect(shown.page.locator("body")).to_have_attribute("data-stale", "true")
        await expect(shown.page.locator("tbody tr")).to_have_count(3)

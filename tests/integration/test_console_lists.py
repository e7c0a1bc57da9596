"""The console's lists in a headless Chromium: on narrow screens, with the order and the filter in the address, and one row a
request."""

from __future__ import annotations

import time

import pytest
from msgspec.structs import replace
from playwright.async_api import expect

from pointsman.router.v1 import placement_pb2
from pointsman_common.io.channel import open_channel
from tests.support.console_page import EVIL, Shown, browser
from tests.support.router import Client, Session
from tests.support.router_past import give_past
from tests.support.waiting import eventually

VIEWS = ("fleet", "history", "decisions", "sessions", "outcomes", "replicas", "fleet/10.0.0.0:8000")
# A phone, a tablet, a laptop.
WIDTHS = (390, 768, 1280)


async def address(shown: Shown) -> str:
    return str(await shown.page.evaluate("location.hash"))


@pytest.mark.parametrize("width", WIDTHS)
async def test_no_page_is_wider_than_the_screen(width: int) -> None:
    """Tables may be wider than a phone, but scroll in a frame of their own."""
    async with browser() as shown:
        give_past(shown.server.router)
        why = f"decisions/{next(shown.server.router.decisions.newest(lambda _: True)).decision.decision_id}"
        await shown.page.set_viewport_size({"width": width, "height": 800})
        for view in (*VIEWS, why):
            await shown.open(view)
            await expect(shown.page.locator("tbody tr").first).to_be_visible()
            wide = await shown.page.evaluate(
                "document.documentElement.scrollWidth - document.documentElement.clientWidth"
            )
            assert wide == 0, (view, width)
            for link in await shown.page.locator("nav a").all():
                box = await link.bounding_box()
                assert box is not None
                assert box["x"] >= 0
                assert box["x"] + box["width"] <= width
        assert shown.wrongs == []


async def test_order_and_filter_stay_in_the_address() -> None:
    async with browser(instances=12) as shown:
        page, rows = shown.page, shown.page.locator("tbody tr")
        await shown.open("fleet")
        await page.get_by_role("button", name="KV used").click()
        await expect(rows.first).to_contain_text(EVIL)
        await page.get_by_role("searchbox").fill("10.0.0.1")
        await expect(rows).to_have_count(2)
        assert await address(shown) == "#/fleet?sort=-kv&filter=10.0.0.1"

        async def as_before() -> None:
            await expect(page.get_by_role("searchbox")).to_have_value("10.0.0.1")
            await expect(rows).to_have_count(2)
            await expect(rows.first).to_contain_text("10.0.0.10:8000")

        await as_before()
        await page.reload()
        await as_before()
        await page.get_by_role("link", name="10.0.0.10:8000").click()
        await expect(page.get_by_role("heading", level=1)).to_have_text("10.0.0.10:8000")
        await page.go_back()
        await as_before()
        await page.get_by_role("link", name="10.0.0.10:8000").click()
        await expect(page.get_by_role("heading", level=1)).to_have_text("10.0.0.10:8000")
        await page.keyboard.press("Escape")
        await as_before()
        await page.get_by_role("link", name="Fleet", exact=True).click()
        await expect(rows).to_have_count(12)
        assert await address(shown) == "#/fleet"
        # Every list keeps its order.
        for view in ("decisions", "sessions", "outcomes", "history"):
            await shown.open(view)
            head = page.locator("th button").nth(1)
            await expect(head).to_be_visible()
            await head.click()
            assert "sort=" in await address(shown), view
            ordered = page.locator("th[aria-sort]")
            shown_order = await ordered.get_attribute("aria-sort")
            await page.reload()
            await expect(ordered).to_have_attribute("aria-sort", shown_order or "")
        assert shown.wrongs == []


async def ask(shown: Shown, request_id: str, outcome: int = placement_pb2.OUTCOME_OK, **changes: object) -> str:
    """Let a request be placed and end; return its instance."""
    async with open_channel(f"127.0.0.1:{shown.server.port}") as channel:
        gateway = Session(Client(channel, ""), request_id)
        await gateway.hello()
        placement = await gateway.place(request_id, 5_000, keys=[1], **changes)
        timings = placement_pb2.Timings(first_token_ms=400.0 if outcome == placement_pb2.OUTCOME_OK else 0.0)
        await gateway.finish(request_id, outcome=outcome, timings=timings)
        decisions = shown.server.router.decisions

        def ended() -> bool:
            logged = decisions.get(request_id)
            return logged is not None and logged.outcome != "OPEN"

        await eventually(ended, f"the end of {request_id}")
        gateway.call.cancel()
        return str(placement.step.instance.instance_id)


async def test_decisions_are_chosen_by_outcome_tenant_model_and_time() -> None:
    async with browser() as shown:
        page, rows = shown.page, shown.page.locator("tbody tr")
        await ask(shown, "broken", placement_pb2.OUTCOME_FAILED, tenant="other")
        await shown.open("decisions")
        await expect(rows).to_have_count(3)
        for name, choice, requests in (("Outcome", "failed", 1), ("Outcome", "open", 1), ("Outcome", "any", 3)):
            await page.get_by_label(name).select_option(choice)
            await expect(rows).to_have_count(requests)
        for name, text, requests in (("Tenant", "t", 2), ("Tenant", "other", 1), ("Tenant", "", 3), ("Model", "m", 3)):
            await page.get_by_label(name).fill(text)
            await page.keyboard.press("Enter")
            await expect(rows).to_have_count(requests)
        await page.get_by_label("Model").fill("another")
        await page.keyboard.press("Enter")
        await expect(page.get_by_text("No decision matches.")).to_be_visible()
        assert await address(shown) == "#/decisions?model=another"
        await shown.open("decisions?since=60&outcome=OK&sort=-input")
        await expect(rows).to_have_count(1)
        await expect(page.get_by_label("Made in")).to_have_value("60")
        # What no choice has is no filter.
        await shown.open("decisions?since=junk&outcome=junk")
        await expect(rows).to_have_count(3)
        assert shown.wrongs == []


async def test_a_prompt_in_slices_is_one_row() -> None:
    async with browser() as shown:
        log = shown.server.router.decisions
        await shown.open("decisions")
        rows = shown.page.locator("tbody tr")
        await expect(rows).to_have_count(2)
        await expect(shown.page.get_by_role("columnheader", name="Parts")).to_have_count(0)
        first = next(log.newest(lambda logged: logged.decision.request.request_id == "request-of-s1")).decision
        before = first
        for number in range(2):
            request = replace(first.request, request_id="sliced")
            previous = before.decision_id if number else ""
            before = replace(first, decision_id=f"part-{number}", request=request, previous_id=previous)
            log.decided(before, time.time(), 0.0)
        await expect(rows).to_have_count(3)
        row = shown.page.get_by_role("row").filter(has_text="2open")
        await expect(row).to_have_count(0)
        cell = rows.first.get_by_role("cell").nth(4)
        await expect(cell).to_have_text("2")
        await expect(shown.page.get_by_role("columnheader", name="Parts")).to_be_visible()
        await shown.page.reload()
        await expect(rows).to_have_count(3)
        assert shown.wrongs == []


async def test_fleet_shows_first_tokens_and_failures_of_each_instance() -> None:
    async with browser() as shown:
        good = await ask(shown, "good")
        bad = await ask(shown, "bad", placement_pb2.OUTCOME_FAILED)
        refused = await ask(shown, "refused", placement_pb2.OUTCOME_REJECTED)
        await shown.open("fleet")
        await expect(shown.page.locator("tbody tr").first).to_be_visible()
        heads = await shown.page.get_by_role("columnheader").all_inner_texts()
        first, failed = (
            next(at for at, head in enumerate(heads) if head.startswith(name)) for name in ("First", "Failed")
        )
        failures = {bad: 1}
        for instance in {good, bad, refused}:
            cells = shown.page.get_by_role("row").filter(has_text=instance).locator("th, td")
            await expect(cells.nth(failed)).to_have_text(str(failures.get(instance, 0)))
        cells = shown.page.get_by_role("row").filter(has_text=good).locator("th, td")
        await expect(cells.nth(first)).to_have_text("400 ms")
        assert shown.wrongs == []

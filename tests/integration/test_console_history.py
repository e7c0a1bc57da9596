"""The console's view of the last 15 minutes in Chromium: curves with gaps, the heat map, by keyboard, without colours, with a big
fleet."""

from __future__ import annotations

import re

import pytest
from playwright.async_api import Locator, Route, expect

from tests.support.console_page import EVIL, Shown, browser
from tests.support.router_past import give_past

PATH = re.compile(r"M[^M]*")
# The colours (r, g, b, a) at points of a canvas, read from a copy.
PIXELS = """(node, points) => {
    const pen = new OffscreenCanvas(node.width, node.height).getContext("2d", { willReadFrequently: true });
    pen.drawImage(node, 0, 0);
    return points.map(([x, y]) => [...pen.getImageData(x, y, 1, 1).data]);
}"""


async def shown_past(shown: Shown, **past: float) -> None:
    give_past(shown.server.router, gap=(400.0, 300.0), **past)
    await shown.open("history")
    await expect(shown.page.locator("tbody tr").first).to_be_visible()


def chart(shown: Shown, title: str) -> Locator:
    return shown.page.get_by_role("figure", name=title, exact=True)


async def test_curves_have_gaps_units_and_a_summary_in_words() -> None:
    async with browser() as shown:
        await shown_past(shown)
        page = shown.page
        await expect(page.locator(".head")).to_contain_text(
            re.compile(r"As this router has seen it since \d\d:\d\d:\d\d, its start")
        )
        requests = chart(shown, "Requests")
        await expect(requests.get_by_role("img")).to_have_attribute(
            "aria-label",
            re.compile(r"Requests over the last 15 minutes\. placed: now .* /s, .* /s to .* /s\. refused: now 0 /s"),
        )
        path = await chart(shown, "Open requests").locator("path.curve").last.get_attribute("d") or ""
        # One path before and one after the time without data; nothing is drawn at 0 in between.
        assert len(PATH.findall(path)) == 2
        held = chart(shown, "Held requests")
        await expect(held.locator("text")).to_contain_text(["before its start", "0", "5", "10", "now"])
        for title, unit in (("Time to first token", "ms"), ("KV used", "%"), ("To prefill", "tok"), ("Backlog", "s")):
            await expect(chart(shown, title).locator(".grid")).to_contain_text(unit)
        # The second line of a chart is dashed.
        dashes = "(node) => getComputedStyle(node).strokeDasharray"
        lines = chart(shown, "KV used").locator("svg[role=img] path.curve")
        assert await lines.nth(0).evaluate(dashes) == "none"
        assert await lines.nth(1).evaluate(dashes) != "none"
        await page.emulate_media(forced_colors="active")
        assert await lines.nth(0).evaluate("(node) => getComputedStyle(node).stroke") == await page.evaluate(
            "getComputedStyle(document.body).color"
        )
        assert shown.wrongs == []


async def test_the_cursor_of_the_curves_moves_by_keyboard_and_by_mouse() -> None:
    async with browser() as shown:
        await shown_past(shown)
        cursor = shown.page.get_by_role("slider", name="Open requests, point in time")
        await cursor.focus()
        await shown.page.keyboard.press("Home")
        await expect(cursor).to_have_attribute("aria-valuenow", "0")
        await expect(cursor).to_have_attribute("aria-valuetext", re.compile(r"\d\d:\d\d:\d\d: open \d+"))
        value_text = await cursor.get_attribute("aria-valuetext") or ""
        # All charts are read at one moment.
        for title in ("Open requests", "Held requests", "KV used"):
            await expect(chart(shown, title)).to_contain_text(value_text[:8])
        await shown.page.keyboard.press("ArrowRight")
        await expect(cursor).to_have_attribute("aria-valuenow", "1")
        for _ in range(4):
            await shown.page.keyboard.press("PageUp")
        # The cursor is in the time without data.
        await expect(cursor).to_have_attribute("aria-valuetext", re.compile(r": open –"))
        await shown.page.keyboard.press("Tab")
        await expect(chart(shown, "Open requests")).not_to_contain_text(value_text[:8])
        await cursor.hover(position={"x": 300, "y": 20})
        await expect(chart(shown, "KV used")).to_contain_text(re.compile(r"\d\d:\d\d:\d\d"))
        assert shown.wrongs == []


async def test_the_heat_map_is_read_and_opens_instances_by_keyboard_and_by_mouse() -> None:
    async with browser() as shown:
        await shown_past(shown)
        page = shown.page
        cells, readout = page.get_by_role("application"), page.locator("output.readout")
        await expect(cells).to_have_attribute("aria-label", re.compile("time to first token, median. 3 instances"))
        await cells.focus()
        await page.keyboard.press("ArrowDown")
        await expect(readout).to_contain_text(EVIL)
        await page.keyboard.press("ArrowDown")
        await page.keyboard.press("Home")
        await expect(readout).to_have_text(re.compile(r"10\.0\.0\.0:8000 from \d\d:\d\d:\d\d on: unknown"))
        await page.get_by_label("Colours show").select_option("KV used")
        await expect(page.locator(".legend")).to_contain_text("up to 95 %")
        await expect(cells).to_have_attribute("aria-label", re.compile("KV used"))
        await cells.focus()
        await page.keyboard.press("ArrowRight")
        await page.keyboard.press("ArrowDown")
        await page.keyboard.press("End")
        await expect(readout).to_have_text(re.compile(r"10\.0\.0\.\d:8000 from .* on: \d+ %"))
        row = (
            page.get_by_role("table", name="Instances over the last 15 minutes")
            .get_by_role("row")
            .filter(has_text="10.0.0.1")
        )
        await expect(row).to_contain_text("%")
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("heading", level=1)).to_contain_text("10.0.0.")
        await page.go_back()
        await cells.click(position={"x": 400, "y": 5})
        await expect(page.get_by_role("heading", level=1)).to_have_text(EVIL)
        assert await page.title() == f"{EVIL} – Pointsman"
        assert shown.wrongs == []


async def test_a_pool_is_chosen_and_one_that_another_router_owns_says_so() -> None:
    async with browser() as shown:
        await shown_past(shown)
        page = shown.page
        await page.get_by_label("of").first.select_option("m")
        await expect(page).to_have_url(re.compile("pool=m"))
        await expect(page.locator(".head")).to_contain_text("its start.")

        async def of_another(route: Route) -> None:
            answer = await route.fetch()
            history = await answer.json()
            del history["pools"][0]["ownedSince"]
            await route.fulfill(json=history)

        await page.route("**/api/ListPoolHistories", of_another)
        await expect(page.locator(".head")).to_contain_text(
            "It does not place this pool's requests: their owner knows these."
        )
        assert shown.wrongs == []


@pytest.mark.timeout(600)  # A browser draws them: minutes on a busy machine.
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_500_instances_are_sorted_filtered_and_drawn_in_their_scheme(scheme: str) -> None:
    async with browser(instances=500, scheme=scheme) as shown:
        await shown_past(shown)
        page = shown.page
        await page.get_by_label("Colours show").select_option("KV used")
        await expect(page.get_by_role("application")).to_have_attribute("aria-label", re.compile("KV used. 500"))
        # One pixel for each value. An unknown value is transparent and shows the pattern behind it.
        sides = "(node) => [node.width, node.height]"
        canvas = page.locator(".cells canvas")
        assert await canvas.evaluate(sides) == [60, 500]
        unknown, (*idle, shown_at_all) = await canvas.evaluate(PIXELS, [[2, 499], [58, 2]])
        assert unknown[3] == 0
        assert shown_at_all == 255
        assert sum(idle) > 500 if scheme == "light" else sum(idle) < 250
        await page.get_by_label("sorted by").select_option("highest value, highest first")
        await page.get_by_role("application").focus()
        await page.keyboard.press("ArrowDown")
        await expect(page.locator("output.readout")).to_contain_text(EVIL)
        await page.get_by_role("searchbox").fill("10.0.3.")
        await expect(page.get_by_text("100 of 500")).to_be_visible()
        await expect(page.get_by_role("application")).to_have_attribute("aria-label", re.compile("100 instances"))
        assert shown.wrongs == []

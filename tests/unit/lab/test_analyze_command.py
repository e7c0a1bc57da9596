"""The analysis of runs, checked by hand, and the page that shows it."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from pointsman_lab.report.analyze_command import analyze, names_of, render
from pointsman_lab.report.bundle import Bundle, write_bundle
from pointsman_lab.report.diagnostics import (
    by_class,
    by_decision,
    hotspot,
    match_runs,
    panel_maxima,
    slowest,
    tail_counts,
    timelines,
)
from pointsman_lab.report.instance_samples import GpuSample, InstanceSample
from pointsman_lab.report.request_record import RequestRecord
from pointsman_lab.report.run_summary import summarise
from pointsman_lab.report.sections import Table, sections

APP = typer.Typer()
APP.command()(analyze)


def answer(session: str, turn: int, ttft: float, **more: Any) -> RequestRecord:
    fields: dict[str, Any] = {
        "instance": "i1",
        "status": 200,
        "route_class": "LIGHT",
        "rule": "session_affinity",
        "mode": "COLOCATED",
    }
    fields |= {
        "t_send": 10.0 * turn,
        "e2e_s": ttft + 2.0,
        "prompt_tokens": 100,
        "cached_tokens": 40,
        "output_tokens": 5,
    }
    return RequestRecord(session=session, turn=turn, ttft_s=ttft, **(fields | more))


RECORDS = [
    answer("a", 1, 1.0, route_class="HEAVY", cached_tokens=0),
    answer("a", 2, 31.0),
    answer("b", 1, 6.0, instance="i2", route_class="HEAVY", mode="OFFLOAD", rule="offload"),
    answer("b", 2, 0.5, instance="i2", rule="least_load_x_work"),
    answer("c", 1, 9.0, status=503),
]


def test_splits_and_tails_by_hand() -> None:
    assert {name: len(of) for name, of in by_class(RECORDS).items()} == {"LIGHT": 2, "HEAVY_COLO": 1, "HEAVY_P2P": 1}
    assert {name: len(of) for name, of in by_decision(RECORDS).items()} == {
        "session_affinity": 2,
        "offload": 1,
        "least_load_x_work": 1,
    }
    assert tail_counts(RECORDS) == {"TTFT": [2, 1, 1, 1, 0, 0], "E2E": [2, 1, 1, 1, 0, 0]}
    # Requests without a route class are in no table.
    assert by_class([answer("a", 1, 1.0, route_class="")]) == {}


def test_the_hotspot_is_where_requests_are_open_longest() -> None:
    spot = hotspot(RECORDS)
    assert spot is not None
    assert spot.instance == "i1"
    # a 3 and 33 s, c 11 s, on i1; b 8 and 2.5 s on i2; from 10 s to 53 s.
    assert spot.open_mean == pytest.approx(47 / 43)
    assert spot.ratio == pytest.approx(47 / ((47 + 10.5) / 2))
    assert [(session.session, session.requests, session.computed_tokens) for session in spot.sessions] == [
        ("a", 2, 160),
        ("c", 1, 60),
    ]
    assert hotspot([]) is None
    of_four = hotspot(RECORDS, ("i1", "idle", "also idle"))
    assert of_four is not None
    assert of_four.ratio == pytest.approx(47 / ((47 + 10.5) / 4))
    (worst, beside), *_ = slowest(RECORDS)
    assert (worst.session, worst.turn, beside) == ("a", 2, 1)


def test_pairs_by_hand() -> None:
    other = [answer("a", 1, 3.0), answer("a", 2, 30.0), answer("b", 1, 8.0), answer("d", 1, 1.0)]
    pairs = match_runs(RECORDS, other)
    assert (len(pairs.base), pairs.unmatched) == (3, 2)
    found = pairs.difference("ttft_s")
    assert found is not None
    assert (found.pairs, found.mean, found.median) == (3, 1.0, 2.0)
    assert (found.faster, found.slower) == pytest.approx((1 / 3, 2 / 3))
    # Whole sessions are drawn: a twice (1 s in two requests each), b twice (2 s), or one of each.
    assert (found.low, found.high) == (0.5, 2.0)
    heavy = pairs.difference("ttft_s", "HEAVY_P2P")
    assert heavy is not None
    assert (heavy.pairs, heavy.low, heavy.mean, heavy.high) == (1, 2.0, 2.0, 2.0)
    assert pairs.difference("ttft_s", "MEDIUM") is None
    assert [first.turn for first, _ in pairs.extremes()] == [1, 1, 2]


def test_timelines_from_samples() -> None:
    samples = [
        InstanceSample(
            t=float(second), instance="i1", num_requests=second, prefix_queries=10 * second, prefix_hits=4 * second
        )
        for second in range(1, 9)
    ]
    found = timelines([answer("a", 1, 1.0, t_send=0.0, e2e_s=8.0)], samples, pieces=8)
    assert found is not None
    assert found.sampled
    assert found.times.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert found.panels["requests in flight"].tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]]
    hits = found.panels["prompt tokens from cache, %"][0]
    assert np.isnan(hits[0])
    assert hits[1:].tolist() == pytest.approx([40.0] * 7)
    assert panel_maxima([found])["requests in flight"] == 8
    assert panel_maxima([found])["KV in use, %"] == 100
    assert "GPU busy, %" not in found.panels


def test_devices_are_shown_where_there_are_some() -> None:
    gpus = tuple(
        GpuSample(index=index, utilisation=busy, memory_used=0, memory_total=1) for index, busy in enumerate((0.2, 0.6))
    )
    samples = [InstanceSample(t=1.0, instance="i1", gpus=gpus), InstanceSample(t=1.0, instance="i2")]
    found = timelines([answer("a", 1, 1.0, t_send=0.0, e2e_s=2.0)], samples, pieces=2)
    assert found is not None
    busy, none = found.panels["GPU busy, %"]
    assert busy[1] == pytest.approx(40.0)
    assert np.isnan(none).all()


def test_timelines_from_requests_alone() -> None:
    records = [answer("a", 1, 1.0, t_send=0.0, e2e_s=4.0), answer("b", 1, 1.0, t_send=2.0, e2e_s=2.0)]
    found = timelines(records, (), pieces=4)
    assert found is not None
    assert not found.sampled
    assert found.panels["requests in flight"].tolist() == [[1, 1, 2, 2]]
    assert timelines([], ()) is None


def test_runs_are_named_by_what_tells_them_apart(tmp_path: Path) -> None:
    one, two, three = tmp_path / "x" / "run", tmp_path / "y" / "run", tmp_path / "y" / "other"
    assert names_of([one, three]) == ["run", "other"]
    assert names_of([one, two]) == ["x/run", "y/run"]
    assert len(set(names_of([one, one]))) == 2


class Page(HTMLParser):
    """Checks that elements are balanced; collects ids and what is fetched from elsewhere."""

    VOID = ("meta", "link", "br", "img", "hr", "input")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.targets: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        self.ids += [value or "" for name, value in attrs if name == "id"]
        self.targets += [value or "" for name, value in attrs if name in ("href", "xlink:href", "src")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_needs_nothing_else() -> None:
    name = 'run <b> & "more"'
    samples = [
        InstanceSample(t=float(at), instance=instance, num_requests=2) for at in range(40) for instance in ("i1", "i2")
    ]
    run = Bundle({"kind": "replay", "policy": "<script>"}, RECORDS, {}, samples)
    text = render({name: run, "second": Bundle({}, RECORDS, {})})
    assert text == render({name: run, "second": Bundle({}, RECORDS, {})})
    page = Page()
    page.feed(text)
    page.close()
    assert page.open == []
    assert len(page.ids) == len(set(page.ids))
    assert "<script" not in text
    assert "<b>" not in text
    for target in page.targets:
        assert target.startswith(("#", "data:image/png;base64,"))
        assert not target.startswith("#") or target[1:] in page.ids
    assert not re.findall(r"url\((?!#)", text)
    assert "@import" not in text
    drawn = re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)
    assert len(drawn) == 8
    for picture in drawn:
        ElementTree.fromstring(picture)
        # Charts draw in the page's own colour, so that they can be read on a dark page.
        assert "#0101" not in picture
        assert "#000000" not in picture


def test_the_command_prints_and_writes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_bundle(tmp_path / name, {}, RECORDS, summarise(RECORDS))
    shown = CliRunner().invoke(APP, [str(tmp_path / "one"), str(tmp_path / "two")])
    assert shown.exit_code == 0, shown.output
    # The bottom line is printed first, and once.
    assert shown.output.lstrip().startswith("Bottom line: the mean change of the requests that one answered, too.")
    assert shown.output.count("no difference (0 ms to 0 ms)") == 3
    assert "verdict" not in shown.output
    for title in ("Latencies", "By class", "Long tail", "Hotspot of one", "two against one, request by request"):
        assert title in shown.output
    assert (tmp_path / "one" / "report.html").read_text().startswith("<!doctype html>")
    elsewhere = CliRunner().invoke(APP, [str(tmp_path / "two"), "--html", str(tmp_path / "deep" / "page.html")])
    assert elsewhere.exit_code == 0
    assert "Bottom line" not in elsewhere.output
    assert (tmp_path / "deep" / "page.html").exists()


def test_what_was_cached_when_placed_and_no_longer_when_begun_is_reported() -> None:
    records = [
        answer("a", 1, 111.0, prompt_tokens=9_000, predicted_cached_tokens=8_992, cached_tokens=0),
        answer("a", 2, 1.0, prompt_tokens=9_100, predicted_cached_tokens=64, cached_tokens=96),
    ]
    [slowest] = [
        section for section in sections({"run": Bundle({}, records, {})}, draw=False) if "Slowest" in section.title
    ]
    assert "In 1 of 2 requests the engine found less when it began" in slowest.note
    assert "8,992 tokens were computed again" in slowest.note
    [table] = slowest.blocks
    assert isinstance(table, Table)
    place = list(table.columns).index("predicted")
    assert [row[place : place + 2] for row in table.rows] == [["8,992", "0"], ["64", "96"]]
    [untold] = [
        section for section in sections({"run": Bundle({}, RECORDS, {})}, draw=False) if "Slowest" in section.title
    ]
    assert "predicted" not in untold.note


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda folder: (folder / "metrics.jsonl").write_text('{"session": "a", "turn": "x"}\n'),
            r"metrics\.jsonl:1: ",
        ),
        (lambda folder: (folder / "metrics.jsonl").write_text(""), "it has no requests"),
        (lambda folder: (folder / "timeline.jsonl").write_text("{"), r"timeline\.jsonl:1: "),
        (lambda folder: (folder / "config.json").write_text("[]"), r"config\.json: "),
    ],
)
def test_a_broken_bundle_is_named(tmp_path: Path, spoil: Any, message: str) -> None:
    write_bundle(tmp_path, {}, RECORDS, summarise(RECORDS))
    spoil(tmp_path)
    failed = CliRunner().invoke(APP, [str(tmp_path)])
    assert failed.exit_code == 2
    assert re.search(message, failed.output)

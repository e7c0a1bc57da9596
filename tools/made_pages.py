"""Writes what docs/ has from the code: the pages on commands, settings and metrics, that on one GPU from its stored
results, and marked sections of that on policies.

    .venv/bin/python -m tools.made_pages

It prints the pages that it has changed. A test compares the files with the code.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from bench.gpu import page as gpu_page
from pointsman_agent.io.status import AgentCollector
from pointsman_cli import settings_page
from pointsman_common.io.line_file import LostLines
from pointsman_gateway.core.tokens.token_cache import TokenCache
from pointsman_gateway.io.processes.sibling_processes import merged
from pointsman_gateway.io.telemetry.metrics import GatewayMetrics
from pointsman_lab.rival_policies.registry import POLICIES
from pointsman_router.core.policy.base import bounds, settings_of, summary
from pointsman_router.core.policy.reasons import REASONS
from pointsman_router.core.policy.registry import DEFAULT_POLICY, make_policy
from pointsman_router.core.router_state import RouterState, StateSettings
from pointsman_router.io.telemetry.event_metrics import EventMetrics
from pointsman_router.io.telemetry.state_metrics import StateCollector
from tools.commands_page import commands

DOCS = Path(__file__).resolve().parent.parent / "docs"
# A section's name, and what stands between its marks.
SECTION = re.compile(r"(?<=<!-- made: )(\w+)( -->\n).*?(?=<!-- end -->)", re.DOTALL)
METRICS = """\
# Metrics

Made from the code by `python -m tools.made_pages`; a test compares this page with the code. Routers and agents serve their
metrics at `/metrics` of `metrics_listen`, gateways at that of `listen`. A histogram has the series NAME_bucket, NAME_sum and
NAME_count. The label `instance` is an engine. Dashboards and alert rules are in [deploy/telemetry](../deploy/telemetry).
"""


def written() -> dict[Path, str]:
    """Return file -> content of every page that is made, or has a made section."""
    policies = DOCS / "policies.md"
    return {
        DOCS / "commands.md": commands(),
        DOCS / "settings.md": settings_page.page(),
        DOCS / "metrics.md": metrics(),
        gpu_page.PAGE: gpu_page.written(),
        policies: with_sections(policies.read_text()),
    }


def write(pages: Mapping[Path, str]) -> list[Path]:
    """Write the pages whose content differs from their file's, and return these."""
    changed = [file for file, content in pages.items() if file.read_text() != content]
    for file in changed:
        file.write_text(pages[file])
    return changed


def with_sections(page: str) -> str:
    """Return the page on policies with its marked sections made anew. Raises KeyError for an unknown section."""
    sections = {
        "rules": table(
            ["policy", "rule", "of a large pool it sees"],
            (
                [f"`{name}`", summary(kind), "a part" if kind.uses_shortlist else "all"]
                for name, kind in POLICIES.items()
            ),
        ),
        "reasons": table(["reason", "what it means"], ([f"`{name}`", meaning] for name, meaning in REASONS.items())),
        "formulas": "\n".join(_formulas()),
    }
    return SECTION.sub(lambda found: f"{found[1]}{found[2]}{sections[found[1]]}", page)


def _formulas() -> Iterator[str]:
    for name, kind in POLICIES.items():
        yield f"### {name}\n\n```text\n{inspect.cleandoc(kind.__doc__ or '')}\n```\n"
        if settings := settings_of(kind):
            yield table(
                ["setting", "default", "allowed", "what it is"],
                (
                    [f"`{setting.name}`", f"`{setting.default}`", bounds(setting), setting.metadata["doc"]]
                    for setting in settings
                ),
            )


def metrics() -> str:
    """Return the content of docs/metrics.md."""
    router, gateway, agent = EventMetrics().registry, GatewayMetrics(TokenCache(0)).registry, CollectorRegistry()
    router.register(StateCollector(RouterState(make_policy(DEFAULT_POLICY), StateSettings()), lambda: True))
    router.register(LostLines("router", int))
    gateway.register(LostLines("gateway", int))
    agent.register(AgentCollector([]))
    of_all_processes = [
        (f"`{family.name}`", family.type, "", family.documentation)
        for family in text_string_to_metric_families(asyncio.run(merged([])).decode())
    ]
    head = ["metric", "type", "labels", "what it is"]
    parts = [METRICS]
    for title, rows in (
        ("Router", _families(router)),
        ("Gateway", [*_families(gateway), *of_all_processes]),
        ("Agent", _families(agent)),
    ):
        parts.append(f"## {title}\n\n{table(head, sorted(rows))}")
    return "\n".join(parts)


def _families(registry: CollectorRegistry) -> Iterator[tuple[str, str, str, str]]:
    """Yield (name, type, labels, documentation) of each metric. Without a series only the objects themselves have the labels."""
    for collector in registry._collector_to_names:
        for family in collector.collect():
            name = f"{family.name}_total" if family.type == "counter" else family.name
            labels = getattr(family, "_labelnames", ()) or getattr(collector, "_labelnames", ())
            yield f"`{name}`", family.type, ", ".join(labels), family.documentation


def table(head: list[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table."""
    cells = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |\n" for row in cells)


if __name__ == "__main__":
    for file in write(written()):
        print(f"changed: {file.relative_to(DOCS.parent)}")

"""Operators' queries of a running fleet: `pointsman instances`, `decisions`, `explain`, `policies`, `doctor`.

`decisions verify` and `what-if` are in pointsman_cli.policy_commands, `drain` and `cordon` in pointsman_cli.instance_commands.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import textwrap
import urllib.error
import urllib.request
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import grpc
import typer
from google.protobuf import json_format
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from pointsman.agent.v1 import agent_pb2
from pointsman.router.v1 import fleet_pb2, placement_pb2
from pointsman_cli.all_routers import instances_of, newest_decisions, of_its_router, pool_policies, warn
from pointsman_cli.doctor import examine
from pointsman_cli.doctor_findings import EngineAccess, Finding, json_object, reason_of_request
from pointsman_cli.doctor_gateways import GATEWAY, gateway_context
from pointsman_cli.doctor_redis import RedisUrls
from pointsman_cli.installed_policies import installed_policies
from pointsman_cli.instance_commands import (
    RouterFlag,
    absent_lines,
    cordon,
    drain,
    order_words,
    orders_of,
    state_words,
    suspension,
    uncordon,
    weight,
    weight_words,
)
from pointsman_cli.policy_commands import set_policy, verify, what_if
from pointsman_cli.router_call import DEFAULT_ROUTER, UNUSABLE, fail, key_of, no_answer, seconds_of, url_of
from pointsman_common.core.enum_words import values, word
from pointsman_common.core.printable import printable
from pointsman_common.io.direct_http import open_directly
from pointsman_common.io.tls import client_context
from pointsman_router.core.placement_types import LIGHT_NEW_TOKENS
from pointsman_router.core.policy.auto import Auto
from pointsman_router.core.policy.base import SettingError, bounds, settings_of
from pointsman_router.core.policy.reasons import ROUTE_CLASSES, explained
from pointsman_router.core.policy.registry import LAB_POLICIES, make_policy

# Timeout of a call or an HTTP request, s.
TIMEOUT_S = 10.0

GatewayFlag = Annotated[
    str, typer.Option(envvar="POINTSMAN_GATEWAY", callback=url_of, help="base URL, or HOST:PORT, of a gateway")
]
JsonFlag = Annotated[bool, typer.Option("--json", help="print JSON instead of a table")]

# Environment variable with a client's API key. There is no flag for the key, because all users of a machine can see flags.
API_KEY = "POINTSMAN_API_KEY"

# Why an answered request has no TTFT.
UNTIMED = "the answer was not streamed; only streams have a first token"

# In a pipe rich assumes 80 columns, which would fold the tables. Names of clients and engines are shown as they are: ":cat:" is
# no emoji, and what looks like rich's markup is none, except in the few lines that ask for it.
console = Console(width=None if sys.stdout.isatty() else 180, markup=False, emoji=False)


def add_fleet_commands(app: typer.Typer) -> None:
    """Register the commands of this module."""
    for command in (instances, explain, policies, drain, cordon, uncordon, doctor):
        app.command()(command)
    # A negative weight must be parsed as the argument, not as an option. The router then rejects the weight.
    app.command(context_settings={"ignore_unknown_options": True})(weight)
    app.command("what-if")(what_if)
    app.command("set-policy")(set_policy)
    group = typer.Typer(invoke_without_command=True)
    group.callback()(decisions)
    group.command()(verify)
    app.add_typer(group, name="decisions")


def instances(
    router: RouterFlag = DEFAULT_ROUTER,
    model: Annotated[str, typer.Option(help="list those of this model only")] = "",
    as_json: JsonFlag = False,
) -> None:
    """List the instances of a fleet with their state, load, cached keys and sessions."""
    try:
        answer, silent = instances_of(router, model)
    except grpc.RpcError as error:
        no_answer(router, error)
    for problem in silent:
        warn(problem)
    if as_json:
        typer.echo(json_format.MessageToJson(answer, preserving_proto_field_name=True, sort_keys=True))
        return
    table = _table("instance", "model", "state", "requests", "pending", "decode", "running", "waiting", "kv", "keys",
                   "hit", "sessions", "report", "process")  # fmt: skip
    for status in answer.instances:
        load = status.load
        _add_row(
            table,
            status.instance.instance_id,
            status.instance.model,
            _state_of(status),
            str(status.num_requests),
            f"{status.pending_prefill_tokens:,}",
            f"{status.ongoing_decode_tokens:,}",
            # Before its first report nothing is known.
            *(_reported(load) if status.HasField("load") else ("-", "-", "-")),
            f"~{status.approximate_keys:,}"
            if status.prefix_source == fleet_pb2.PREFIX_SOURCE_APPROXIMATE
            else f"{status.keys:,}",
            f"{load.prefix_cache_hits / load.prefix_cache_queries:.0%}" if load.prefix_cache_queries else "-",
            str(status.sessions),
            f"{status.report_age.ToMilliseconds() / 1e3:.1f} s ago",
            status.instance.incarnation[:12],
        )
    _print_rows(table)
    for line in absent_lines(answer):
        console.print(line, highlight=False)
    for order in _orders_for_unknown(router):
        console.print(f"{order.instance_id}: no agent reports it ({order_words(order)})", highlight=False)
    console.print(
        f"policy {_policy(answer.policy)}  router {answer.router_id}"
        + (f"  {answer.held_requests} requests held" if answer.held_requests else "")
    )
    if answer.policy.name == Auto.name:
        # The model may be given by another name than its pool's.
        listed = {status.instance.model for status in answer.instances}
        for pool, taken in pool_policies(router).items():
            if not model or pool in listed:
                console.print(f"{pool}: {_taken(taken)}", highlight=False)


def _reported(report: agent_pb2.Load | fleet_pb2.Candidate) -> tuple[str, str, str]:
    """Return the running and waiting requests and the KV usage of an engine's report, "?" for what it does not report."""
    figures = {"running": str(report.running), "waiting": str(report.waiting), "kv_usage": f"{report.kv_usage:.0%}"}
    running, waiting, kv_usage = ("?" if name in report.unknown else figure for name, figure in figures.items())
    return running, waiting, kv_usage


def _taken(policy: fleet_pb2.PoolPolicy) -> str:
    """Return which policy decides for a pool and why, with the numbers that this depends on."""
    ready = policy.ready_instances
    began = datetime.now().astimezone() - policy.age.ToTimedelta()
    since = f" since {began:%Y-%m-%d %H:%M:%S}" if policy.HasField("age") else ""
    asked = f"; they ask for {policy.asked_name} ({explained(policy.asked_reason)})" if policy.asked_name else ""
    return (
        f"{policy.name}{since} ({explained(policy.reason)}); of {ready} ready instances "
        f"{policy.exact_instances} report KV events, {policy.learned_instances} have a learned curve; the mean prefill costs "
        f"{policy.mean_cost:.2g} x that of a new prompt of {LIGHT_NEW_TOKENS:,} tokens{asked}"
    )


def _orders_for_unknown(router: str) -> list[fleet_pb2.InstanceOrder]:
    try:
        return [order for order in orders_of(router) if not order.instance_known]
    except grpc.RpcError as error:
        no_answer(router, error)


def _state_of(status: fleet_pb2.InstanceStatus) -> str:
    """Return an instance's state as text, followed by operators' orders and by what is unusual about its keys."""
    remarks = [words for words in (suspension(status), status.cordon_reason, weight_words(status)) if words]
    if status.prefix_source == fleet_pb2.PREFIX_SOURCE_APPROXIMATE:
        remarks.append("approximate: its KV events contradict answers" if status.events_contradicted else "approximate")
    if status.prefix_source == fleet_pb2.PREFIX_SOURCE_NONE and status.state == fleet_pb2.INSTANCE_STATE_READY:
        remarks.append("cache counted as empty")
    if status.circuit_open:
        remarks.append(f"out: {status.life.reason}" if status.life.reason else "out")
    elif status.life.reason:
        remarks.append(status.life.reason)
    if status.prediction_audit_failures:
        remarks.append(f"prediction audit failed {status.prediction_audit_failures}x")
    state = state_words(status)
    return f"{state} ({', '.join(remarks)})" if remarks else state


def decisions(
    context: typer.Context,
    router: RouterFlag = DEFAULT_ROUTER,
    session: Annotated[str, typer.Option(help="list those of this session only")] = "",
    instance: Annotated[str, typer.Option(help="list those of this instance only")] = "",
    route_class: Annotated[str, typer.Option(help="light, medium or heavy")] = "",
    reason: Annotated[str, typer.Option(help="list those with this reason only (see pointsman policies)")] = "",
    outcome: Annotated[str, typer.Option(help="open, ok, failed, rejected, cancelled or unknown")] = "",
    tenant: Annotated[str, typer.Option(help="list those of this tenant only")] = "",
    model: Annotated[str, typer.Option(help="list those of this model's pool only")] = "",
    since: Annotated[
        float | None, typer.Option(callback=seconds_of, help="maximum age of a decision, in seconds")
    ] = None,
    until: Annotated[
        float | None, typer.Option(callback=seconds_of, help="minimum age of a decision, in seconds")
    ] = None,
    limit: Annotated[int, typer.Option("-n", "--limit", min=1, max=1000, help="maximum number")] = 20,
    as_json: JsonFlag = False,
) -> None:
    """List the newest decisions of all routers: where each request was placed, and why."""
    if context.invoked_subcommand is not None:
        return
    classes, outcomes = values(fleet_pb2.RouteClass), values(fleet_pb2.DecisionOutcome)
    for flag, given, allowed in (("route-class", route_class, classes), ("outcome", outcome, outcomes)):
        if given.upper() not in allowed:
            fail(f"--{flag} {given}: one of {', '.join(filter(None, allowed))} is needed", UNUSABLE)
    wanted = fleet_pb2.DecisionFilter(
        session_id=session,
        instance_id=instance,
        route_class=classes[route_class.upper()],
        reason=reason,
        outcome=outcomes[outcome.upper()],
        tenant=tenant,
        model=model,
    )
    for bound, seconds in ((wanted.since, since), (wanted.until, until)):
        if seconds is not None:
            bound.FromNanoseconds(int(seconds * 1e9))
    request = fleet_pb2.ListDecisionsRequest(filter=wanted, page_size=limit)
    answer = newest_decisions(router, request)
    if as_json:
        typer.echo(json_format.MessageToJson(answer, preserving_proto_field_name=True, sort_keys=True))
        return
    table = _table("decision", "time", "session", "input", "cached", "engine said", "class", "reason", "instance", "margin",
                   "outcome", "TTFT")  # fmt: skip
    for listed in answer.decisions:
        done = listed.finished
        _add_row(
            table,
            listed.decision_id,
            # The local time, as in the console and in what `instances` says of policies.
            f"{listed.time.ToDatetime(UTC).astimezone():%H:%M:%S.%f}"[:-3],
            listed.session_id[:24],
            f"{listed.input_tokens:,}",
            f"{listed.cached_tokens:,}",
            f"{done.cached_tokens - done.own_cached_tokens:,}" if done.HasField("cached_tokens") else "-",
            word(fleet_pb2.RouteClass, listed.route_class),
            listed.reason,
            " -> ".join(step.instance.instance_id for step in listed.steps),
            _score(listed.margin) if listed.HasField("margin") else "-",
            word(fleet_pb2.DecisionOutcome, listed.outcome),
            f"{done.timings.first_token_ms:,.0f} ms" if done.timings.first_token_ms else "-",
        )
    _print_rows(table)
    if any(_ended_untimed(listed) for listed in answer.decisions):
        console.print(f"TTFT -: {UNTIMED}", highlight=False)


def _ended_untimed(decision: fleet_pb2.Decision) -> bool:
    """Return whether a request was answered without a known TTFT."""
    return decision.outcome == fleet_pb2.DECISION_OUTCOME_OK and not decision.finished.timings.first_token_ms


def explain(
    decision_id: Annotated[str, typer.Argument(help="decision id or request id; omit it with --prompt")] = "",
    router: RouterFlag = DEFAULT_ROUTER,
    gateway: GatewayFlag = GATEWAY,
    prompt: Annotated[
        Path | None,
        typer.Option(help="file with a prompt to place in a dry run", exists=True, dir_okay=False, readable=True),
    ] = None,
    model: Annotated[str, typer.Option(help="model for --prompt; default: the gateway's only one")] = "",
    session: Annotated[str, typer.Option(help="session id for --prompt")] = "",
    as_json: JsonFlag = False,
) -> None:
    """Explain why a request was placed where it was.

    With --prompt: show where the prompt would be placed now, without sending it to an engine.
    """
    if prompt is not None:
        decision = _dry_run(gateway, prompt, model, session)
    elif decision_id:
        request = fleet_pb2.GetDecisionRequest(decision_id=decision_id)
        decision = of_its_router(router, decision_id, lambda fleet: fleet.GetDecision, request, TIMEOUT_S).decision
    else:
        fail("give a decision id, or --prompt FILE")
    if as_json:
        typer.echo(json_format.MessageToJson(decision, preserving_proto_field_name=True, sort_keys=True))
    else:
        _print_decision(decision)


def policies(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="only these policies")] = None,
) -> None:
    """Print policies with their formulas, reasons, sources, and settings with bounds."""
    installed = installed_policies()
    if unknown := sorted(set(names or ()) - {*installed, *LAB_POLICIES}):
        fail(f"no policy is called {', '.join(unknown)}; there are {', '.join(installed)}")
    try:
        kinds = [type(make_policy(name, policies=installed)) for name in names or installed]
    except SettingError as error:
        fail(error.sentence)
    for kind in kinds:
        console.print(kind.name, style="bold", highlight=False)
        console.print(textwrap.indent(inspect.cleandoc(kind.__doc__ or ""), "  "), highlight=False)
        if settings := settings_of(kind):
            console.print("  Settings:")
        for setting in settings:
            console.print(
                f"    {setting.name} = {setting.default} ({bounds(setting)}): {setting.metadata['doc']}",
                highlight=False,
            )
        console.print()


def doctor(
    router: RouterFlag = DEFAULT_ROUTER,
    gateway: Annotated[
        str,
        typer.Option(
            envvar="POINTSMAN_GATEWAY",
            callback=lambda given: url_of(given) if given else "",
            help="base URL, or HOST:PORT, of the gateway to check; without it, those that the router knows",
        ),
    ] = "",
    redis_url: Annotated[
        str, typer.Option(envvar="POINTSMAN_ROUTER_REDIS_URL", help="URL of the routers' Redis, to check it")
    ] = "",
    redis_sentinels: Annotated[
        str,
        typer.Option(
            envvar="POINTSMAN_ROUTER_REDIS_SENTINELS", help="URLs of the Sentinels that name the Redis to check"
        ),
    ] = "",
    redis_master: Annotated[
        str, typer.Option(envvar="POINTSMAN_ROUTER_REDIS_MASTER", help="name of the master at the Sentinels")
    ] = "mymaster",
    agent: Annotated[
        list[str] | None,
        typer.Option(
            envvar="POINTSMAN_AGENT",
            help="base URL of an agent to check, with its engines: http://HOST:9101",
        ),
    ] = None,
    engine_api_key: Annotated[
        str, typer.Option(envvar="POINTSMAN_GATEWAY_ENGINE_API_KEY", help="API key for engines started with --api-key")
    ] = "",
    engine_ca: Annotated[
        Path | None,
        typer.Option(
            envvar="POINTSMAN_GATEWAY_ENGINE_CA", help="certificates (PEM) of the authorities trusted for HTTPS engines"
        ),
    ] = None,
) -> None:
    """Check a fleet and print what to change.

    Sends each engine a request for one token, and short prompts to pairs that can transfer KV. Exits with status 1 if
    something must be changed.
    """
    try:
        tls = None if engine_ca is None else client_context(engine_ca)
    except (OSError, ValueError) as error:
        fail(str(error))
    try:
        redis = RedisUrls.of(redis_url, redis_sentinels, redis_master)
    except ValueError as error:
        fail(f"--redis-url, --redis-sentinels: {error}")
    access = EngineAccess(key_of("--engine-api-key", engine_api_key), tls)
    findings = examine(router, gateway, redis, list(map(url_of, agent or [])), access)
    table = _table("", "check", "finding", "what to do")
    marks = {"ok": Text("ok", "green"), "warn": Text("warn", "yellow"), "fail": Text("FAIL", "red")}
    for finding in findings:
        _add_row(table, marks[finding.level], finding.check, finding.found, finding.advice)
    console.print(table)
    if any(finding.level == Finding.FAIL for finding in findings):
        raise typer.Exit(1)


def _print_decision(decision: fleet_pb2.Decision) -> None:
    owner = decision.session_owner or "none"
    route_class = word(fleet_pb2.RouteClass, decision.route_class)
    bounds_of_class = f" ({ROUTE_CLASSES[route_class]})" if route_class in ROUTE_CLASSES else ""
    steps = [step.instance.instance_id for step in decision.steps]
    to = " -> ".join(step for number, step in enumerate(steps) if step != steps[number - 1] or not number) or "held"
    console.print(
        f"[bold]{escape(decision.decision_id)}[/bold]  {escape(to)}  [bold]{escape(explained(decision.reason))}[/bold]",
        markup=True,
    )
    console.print(
        f"request {decision.request_id}  session {decision.session_id or '-'} "
        f"(owner then: {owner})  {word(fleet_pb2.DecisionOutcome, decision.outcome)}"
    )
    if decision.agent_id or decision.agent_parent_session_id:
        console.print(f"agent {decision.agent_id or '-'}  started by session {decision.agent_parent_session_id or '-'}")
    console.print(
        f"{decision.input_tokens:,} input tokens ({decision.key_count:,} keys), {decision.cached_tokens:,} cached -> "
        f"{route_class}{bounds_of_class}, {word(fleet_pb2.PlacementMode, decision.mode)}"
        + _loaded(decision.kv_load)
        + (" (degraded)" if decision.degraded else "")
        + (f", held {decision.held.ToMilliseconds() / 1e3:,.2f} s" if decision.held.ToNanoseconds() else "")
        + (f", priority {word(placement_pb2.Priority, decision.priority)}" if decision.priority else "")
        + (f" (weight {decision.weight})" if decision.weight > 1 else "")
        + (f" ({', '.join(decision.notes)})" if decision.notes else "")
    )
    if decision.HasField("admission"):
        admission = decision.admission
        console.print(
            f"admission {admission.reason}: {admission.size:,} tokens beside {admission.weighted:,.0f} under way, "
            f"of {admission.capacity:,.0f}"
            + (f", parked {admission.waited.ToMilliseconds() / 1e3:,.1f} s" if admission.waited.ToNanoseconds() else "")
        )
    console.print(f"policy {_policy(decision.policy)}")
    if decision.taken_policy:
        console.print(f"took {decision.taken_policy} ({explained(decision.taken_policy_reason)})", highlight=False)
    for step in decision.steps:
        kind = placement_pb2.StepKind.Name(step.kind).removeprefix("STEP_KIND_")
        # If the plan's reason explains the plan's form, the step's reason explains the choice of its instance.
        rule = step.reason if step.reason == decision.reason else explained(step.reason)
        tokens = f" of {step.prefix_tokens:,} tokens" if step.prefix_tokens else ""
        source = f", from the KV of {step.kv_source.instance_id}" if step.HasField("kv_source") else ""
        console.print(f"step {step.index}: {kind}{tokens} on {step.instance.instance_id}{source} ({rule})")
    chosen = decision.steps[-1].instance.instance_id if decision.steps else ""
    table = _table(
        "", "candidate", "score", "cached", "new", "requests", "pending", "decode", "kv", "report age", "note"
    )
    for candidate in sorted(
        decision.candidates, key=lambda candidate: (not candidate.HasField("score"), candidate.score)
    ):
        note = candidate.excluded or ("" if candidate.exact else "no keys known")
        note = "; ".join(filter(None, (note, _loaded(candidate.kv_load).removeprefix(", "))))
        _add_row(
            table,
            "->" if candidate.instance_id == chosen else "",
            candidate.instance_id,
            _score(candidate.score) if candidate.HasField("score") else "-",
            f"{candidate.cached_tokens:,}",
            f"{candidate.new_tokens:,}",
            str(candidate.num_requests),
            f"{candidate.pending_prefill_tokens:,}",
            f"{candidate.ongoing_decode_tokens:,}",
            _reported(candidate)[2],
            f"{candidate.report_age.ToMilliseconds():,} ms" if candidate.HasField("report_age") else "-",
            note,
        )
    console.print(table)
    if decision.other_instances:
        console.print(f"{decision.other_instances} others were not compared: less of the prompt cached, or more load")
    if decision.figures:
        console.print(
            "compared " + ", ".join(f"{name} {_score(value)}" for name, value in sorted(decision.figures.items()))
        )
    if decision.runner_up:
        console.print(f"runner-up {decision.runner_up}, margin {_score(decision.margin)}")
    if decision.HasField("finished"):
        done = decision.finished
        own = f", {done.own_cached_tokens:,} of them by its own steps" if done.own_cached_tokens else ""
        said = (
            f"{done.cached_tokens:,} cached{own}" if done.HasField("cached_tokens") else "nothing about cached tokens"
        )
        first = f"{done.timings.first_token_ms:,.1f} ms" if done.timings.first_token_ms else "-"
        if _ended_untimed(decision):
            first += f" ({UNTIMED})"
        console.print(
            f"the engine said: {said}; TTFT {first}"
            # A gateway that was lost tells neither.
            + (f", done after {done.timings.done_ms:,.1f} ms" if done.timings.done_ms else "")
            + (f", HTTP {done.http_status}" if done.http_status else "")
            + _ended_by(done)
        )


def _ended_by(done: placement_pb2.Finished) -> str:
    reason = word(placement_pb2.FinishReason, done.finish_reason).lower()
    return f", finish_reason {reason}" if done.finish_reason else ""


def _score(value: float) -> str:
    # A score is in tokens under most policies, in seconds under some.
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


def _policy(policy: fleet_pb2.Policy) -> str:
    """Return a policy's name and settings as text."""
    settings = json_format.MessageToDict(policy.settings)
    return f"{policy.name} {', '.join(f'{name}={value}' for name, value in sorted(settings.items()))}".rstrip()


def _dry_run(gateway: str, prompt: Path, model: str, session: str) -> fleet_pb2.Decision:
    if not model:
        url = f"{gateway}/v1/models"
        try:
            names = [model["id"] for model in _http(url)["data"]]
        except (LookupError, TypeError):
            fail(f"{url}: what answers there is no gateway")
        if len(names) != 1:
            fail(f"the gateway serves {', '.join(names) or 'no model'}; choose with --model")
        model = names[0]
    try:
        text = prompt.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        fail(
            f"--prompt {prompt}: {'is no text in UTF-8' if isinstance(error, ValueError) else error.strerror}", UNUSABLE
        )
    body = json.dumps({"model": model, "prompt": text}).encode()
    headers = {"Content-Type": "application/json", "X-Pointsman-Dry-Run": "1"}
    if session:
        if not (session.isascii() and session.isprintable()):
            fail(f"--session {printable(session)}: a header can have printable ASCII only", UNUSABLE)
        headers["X-Session-ID"] = session
    url = f"{gateway}/v1/completions"
    answer = _http(url, body, headers)
    try:
        return json_format.ParseDict(answer["decision"], fleet_pb2.Decision(), ignore_unknown_fields=True)
    except (LookupError, TypeError, json_format.ParseError):
        fail(f"{url}: what answers there is no gateway, or of a version without dry runs")


def _http(url: str, body: bytes | None = None, headers: dict[str, str] | None = None) -> Any:
    request = urllib.request.Request(url, data=body, headers=headers or {})
    if key := key_of(API_KEY, os.environ.get(API_KEY, "")):
        request.add_header("Authorization", f"Bearer {key}")
    try:
        tls = gateway_context()
    except (OSError, ValueError) as error:
        fail(f"POINTSMAN_TLS_CA: {error}", UNUSABLE)
    try:
        with open_directly(request, TIMEOUT_S, tls) as answer:
            return json_object(answer)
    except urllib.error.HTTPError as error:
        fail(f"{url} answered {error.code}: {error.read(1_000).decode(errors='replace')}")
    except OSError as error:
        fail(f"{url}: {reason_of_request(error)}")


def _add_row(table: Table, *cells: str | Text) -> None:
    """Add a row whose texts are shown as they are, in one line, without the characters that a terminal obeys."""
    table.add_row(*(Text(printable(cell.replace("\n", " "))) if isinstance(cell, str) else cell for cell in cells))


def _print_rows(table: Table) -> None:
    """Print a table, or "none" if nothing is in it."""
    console.print(table if table.row_count else "none")


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _loaded(load: fleet_pb2.KvLoad) -> str:
    """Return what an instance loads from lower tiers, as in ", loads 4,096 tok from host memory in 12 ms (price 900 tok)"; empty
    if nothing."""
    tiers = (("host memory", load.host_tokens), ("storage", load.storage_tokens))
    parts = [f"{tokens:,} tok from {tier}" for tier, tokens in tiers if tokens]
    if not parts:
        return ""
    return f", loads {' and '.join(parts)} in {load.load_time.ToMilliseconds():,} ms (price {load.price_tokens:,} tok)"

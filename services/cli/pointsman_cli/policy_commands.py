"""Commands about policies: `pointsman decisions verify FILE`, `what-if` and `set-policy`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from google.protobuf import duration_pb2, json_format

from pointsman.router.v1 import fleet_pb2
from pointsman_cli.all_routers import of_its_router, what_if_newest
from pointsman_cli.installed_policies import installed_policies
from pointsman_cli.instance_commands import RouterFlag
from pointsman_cli.router_call import DEFAULT_ROUTER, call, fail, router_of
from pointsman_common.core.enum_words import word
from pointsman_router.core.analysis.decision_replay import admission_differences, differences, inputs_digest, redecide
from pointsman_router.core.policy.base import SettingError
from pointsman_router.core.policy.registry import LAB_POLICIES
from pointsman_router.io.telemetry.decision_log import DecidedLine, MalformedLine, RefusedLine, read_log

# Timeout of a call, s.
TIMEOUT_S = 60.0
# Maximum number of differing decisions that `verify` prints.
SHOWN = 50


def verify(
    file: Annotated[Path, typer.Argument(help="a decision log (POINTSMAN_ROUTER_DECISION_LOG_FILE)", dir_okay=False)],
) -> None:
    """Make every decision of a log again and compare it bit for bit.

    Exits with status 1 if a decision differs or cannot be made again. Decisions of other routers' policies are left out where
    these are not installed.
    """
    decided = different = left_out = 0
    policies = installed_policies()
    try:
        for number, line in read_log(file):
            if isinstance(line, RefusedLine):
                decided += 1
                found = admission_differences(line.admission)
                different += bool(found)
                for difference in found if different <= SHOWN else ():
                    typer.echo(f"{file}, line {number}, {line.request_id}: {difference}")
                continue
            if not isinstance(line, DecidedLine):
                continue
            if line.decision.policy.name in LAB_POLICIES and line.decision.policy.name not in policies:
                left_out += 1
                continue
            decided += 1
            try:
                found = differences(line.decision, redecide(line.decision, policies=policies))
                if (digest := inputs_digest(line.decision)) != line.inputs_digest:
                    found.append(f"inputs_digest: {line.inputs_digest} -> {digest}")
            except SettingError as error:
                found = [f"policy.{error}"]
            except (LookupError, ValueError) as error:
                # The line is well formed but is not a possible decision, for example one on a view without candidates.
                found = [f"cannot be made again: {error!r}"]
            if found:
                different += 1
            for difference in found if different <= SHOWN else ():
                typer.echo(f"{file}, line {number}, {line.decision.decision_id}: {difference}")
    except (MalformedLine, OSError) as error:
        fail(str(error))
    if different > SHOWN:
        typer.echo(f"... and {different - SHOWN} more that differ")
    typer.echo(f"{decided - different} of {decided} decisions are the same when made again")
    if left_out:
        typer.echo(f"{left_out} more are of policies that are not installed: pointsman[lab]")
    if different:
        raise typer.Exit(1)


def what_if(
    policy: Annotated[str, typer.Option(help="policy to decide with (see pointsman policies)")],
    decision_id: Annotated[
        str, typer.Argument(help="decision id or request id; default: the newest decisions, see --last")
    ] = "",
    last: Annotated[int, typer.Option(min=1, max=1000, help="number of the newest decisions to make again")] = 1,
    settings: Annotated[list[str] | None, typer.Option("--set", help="NAME=VALUE of a policy setting")] = None,
    router: RouterFlag = DEFAULT_ROUTER,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of lines")] = False,
) -> None:
    """Show where past requests would have been placed under another policy.

    Each decision is made again on the view of the fleet that the router had at that time. Nothing is sent to an engine.
    """
    request = fleet_pb2.WhatIfRequest(decision_id=decision_id, last=last, policy=_policy(policy, settings))
    if decision_id:
        answer = of_its_router(router, decision_id, lambda fleet: fleet.WhatIf, request, TIMEOUT_S)
    else:
        answer = what_if_newest(router, request, TIMEOUT_S)
    if as_json:
        typer.echo(json_format.MessageToJson(answer, preserving_proto_field_name=True))
        return
    for change in answer.changes:
        via = f" via {change.to_prefill_instance_id}" if change.to_prefill_instance_id else ""
        typer.echo(
            f"{change.decision_id}: {change.from_instance_id} -> {change.to_instance_id or 'held'}{via} ({change.reason})"
            # Of a request that would be held nothing is known; the sums leave it out, too.
            + (f", {change.cached_tokens_change:+,} cached tokens" if change.to_instance_id else "")
            + (f", {_seconds(change.ttft_change)} to the first token" if change.HasField("ttft_change") else "")
        )
    if answer.changed > len(answer.changes):
        typer.echo(f"... and {answer.changed - len(answer.changes)} more")
    for group in answer.groups:
        typer.echo(
            f"{word(fleet_pb2.RouteClass, group.route_class)} {group.reason}: {group.changed:,} of {group.decided:,} changed, "
            f"{group.cached_tokens_change:+,} cached tokens{_mean_change(group)}"
        )
    share = answer.changed / answer.decided if answer.decided else 0.0
    held = f", {answer.held:,} of them held" if answer.held else ""
    typer.echo(
        f"under {policy}, {answer.changed:,} of {answer.decided:,} requests ({share:.0%}) would have had another plan{held}; "
        f"{answer.cached_tokens_change:+,} cached tokens in all{_mean_change(answer)}"
    )


def _seconds(change: duration_pb2.Duration) -> str:
    return f"{change.ToNanoseconds() / 1e9:+.3g} s"


def _mean_change(sums: fleet_pb2.WhatIfResponse | fleet_pb2.WhatIfResponse.Group) -> str:
    """Return the mean change of the predicted time to the first token, as text; "" if no curve was learned."""
    if not sums.timed:
        return ""
    mean_s = sums.ttft_change.ToNanoseconds() / 1e9 / sums.timed
    return f", {mean_s:+.3g} s to the first token in the mean of {sums.timed:,}"


def set_policy(
    policy: Annotated[str, typer.Argument(help="policy to place with from now on (see pointsman policies)")],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="NAME=VALUE of a policy setting; other settings get their defaults"),
    ] = None,
    router: Annotated[
        list[str] | None,
        typer.Option(
            envvar="POINTSMAN_ROUTER",
            help="a router, in the forms that `pointsman instances` takes; routers that share its Redis follow it",
        ),
    ] = None,
) -> None:
    """Change the policy of a router and of all routers that share its Redis.

    Routers that start later use the new policy, too. No request and no state is lost. Prints the policy in force with all its
    settings.
    """
    request = fleet_pb2.SetPolicyRequest(policy=_policy(policy, settings))
    for address in map(router_of, router or [DEFAULT_ROUTER]):
        answer = call(address, lambda fleet: fleet.SetPolicy, request, TIMEOUT_S)
        values = json_format.MessageToDict(answer.policy.settings)
        typer.echo(f"{address}: {answer.policy.name}" + "".join(f" {name}={values[name]}" for name in sorted(values)))
        if answer.this_replica_only:
            typer.echo(
                f"{address}: its Redis is not reachable; other routers follow when it is reachable again", err=True
            )


def _policy(name: str, settings: list[str] | None) -> fleet_pb2.Policy:
    wanted = fleet_pb2.Policy(name=name)
    wanted.settings.update(dict(_setting(setting) for setting in settings or []))
    return wanted


def _setting(text: str) -> tuple[str, float | str | bool]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        fail(f"--set {text}: NAME=VALUE is needed")
    if value in ("true", "false"):
        return name, value == "true"
    try:
        return name, float(value)
    except ValueError:
        return name, value

"""gRPC errors as google.rpc.Status with details that clients act on. Each has an ErrorInfo (https://google.aip.dev/193)."""

from __future__ import annotations

from typing import Any, NoReturn

import grpc
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from pointsman_router.core import events_and_effects as ev
from pointsman_router.core.ownership import Owner
from pointsman_router.core.policy.base import SettingError
from pointsman_router.io.convert.times import duration

DOMAIN = "pointsman"

# ErrorInfo reason by the gRPC status name of a refusal.
_REFUSALS = {
    "NOT_FOUND": "MODEL_NOT_FOUND",
    "RESOURCE_EXHAUSTED": "SATURATED",
    "UNAVAILABLE": "NO_INSTANCE",
    "ABORTED": "REQUEST_ENDED",
    "ALREADY_EXISTS": "REQUEST_ID_IN_USE",
    "DEADLINE_EXCEEDED": "FIRST_TOKEN_TOO_LATE",
}


async def abort(context: Any, status: grpc.Status) -> NoReturn:
    """End a call with `status`. Always raises, as `context.abort` does."""
    await context.abort_with_status(status)
    raise AssertionError("abort_with_status raises")


def refusal_status(refused: ev.Refused, owner: Owner | None = None) -> grpc.Status:
    """Return a refusal as a status, with RetryInfo if a retry may help. If `owner` is given, the reason is NOT_OWNER, and
    the metadata name this owner, which is to be asked instead."""
    if refused.asked_model is not None:
        return field_status("request.model", refused.message)
    details: list[object] = []
    if refused.retry_after_s is not None:
        details.append(error_details_pb2.RetryInfo(retry_delay=duration(refused.retry_after_s)))
    if owner is not None:
        message = f"{refused.message}; its owner is {owner.router_id} at {owner.address}"
        known = {"router_id": owner.router_id, "address": owner.address}
        return _status(refused.code, "NOT_OWNER", message, known, *details)
    reason = "NOT_SERVING" if refused.not_serving else _REFUSALS[refused.code]
    return _status(refused.code, reason, refused.message, {}, *details)


def setting_status(error: SettingError) -> grpc.Status:
    """Return INVALID_ARGUMENT with a BadRequest that names the invalid field below `policy`."""
    violation = error_details_pb2.BadRequest.FieldViolation(field=f"policy.{error.field}", description=str(error))
    bad_request = error_details_pb2.BadRequest(field_violations=[violation])
    return _status("INVALID_ARGUMENT", "INVALID_POLICY", f"policy.{error}", {}, bad_request)


def field_status(field: str, message: str) -> grpc.Status:
    """Return INVALID_ARGUMENT with a BadRequest: a field of the request has an invalid value."""
    violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=message)
    bad_request = error_details_pb2.BadRequest(field_violations=[violation])
    return _status("INVALID_ARGUMENT", "INVALID_FIELD", f"{field}: {message}", {"field": field}, bad_request)


def page_token_status(message: str) -> grpc.Status:
    """Return INVALID_ARGUMENT: this router did not issue the page_token for this request."""
    return _status("INVALID_ARGUMENT", "INVALID_PAGE_TOKEN", message, {})


def not_found_status(what: str, name: str, message: str) -> grpc.Status:
    """Return NOT_FOUND: no `what` (a word such as "instance") has this name."""
    return _status("NOT_FOUND", f"{what.upper()}_NOT_FOUND", message, {what: name})


def policy_changed_status(etag: str) -> grpc.Status:
    """Return ABORTED: the policy in force, identified by `etag`, is not the one that the caller wants to replace."""
    message = "the policy has changed in the meantime: read it again before you change it"
    return _status("ABORTED", "POLICY_CHANGED", message, {"etag": etag})


def too_many_orders_status(most: int) -> grpc.Status:
    """Return RESOURCE_EXHAUSTED: the maximum of `most` instances have orders already."""
    return _status("RESOURCE_EXHAUSTED", "TOO_MANY_ORDERS", f"there are orders for {most:,} instances already", {})


def gateway_id_status(gateway_id: str) -> grpc.Status:
    """Return ALREADY_EXISTS: another gateway uses the id."""
    message = f"the gateway id {gateway_id!r} belongs to another gateway"
    return _status("ALREADY_EXISTS", "GATEWAY_ID_IN_USE", message, {"gateway_id": gateway_id})


def _status(code: str, reason: str, message: str, metadata: dict[str, str], *details: object) -> grpc.Status:
    info = error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN, metadata=metadata)
    packed = [_any(detail) for detail in (info, *details)]
    status: grpc.Status = rpc_status.to_status(
        status_pb2.Status(code=code_pb2.Code.Value(code), message=message, details=packed)
    )
    return status


def _any(message: object) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)  # type: ignore[arg-type]
    return packed

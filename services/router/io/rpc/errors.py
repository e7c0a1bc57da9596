"""Errors as google.rpc.Status, with the details that clients act on."""

from __future__ import annotations

from typing import Any, NoReturn

import grpc
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from pointsman.router.core import events_and_effects as ev
from pointsman.router.core.ownership import Owner
from pointsman.router.core.policy.base import SettingError
from pointsman.router.io.convert.times import duration

DOMAIN = "pointsman"


async def abort(context: Any, status: grpc.Status) -> NoReturn:
    """End a call with `status`; raises, as `context.abort` does."""
    await context.abort_with_status(status)
    raise AssertionError("abort_with_status raises")


def refusal_status(refused: ev.Refused, owner: Owner | None = None) -> grpc.Status:
    """A refusal as a status; with RetryInfo when trying again may help, and ErrorInfo naming the `owner` to ask instead."""
    details = []
    if refused.retry_after_s is not None:
        details.append(_any(error_details_pb2.RetryInfo(retry_delay=duration(refused.retry_after_s))))
    message = refused.message
    if owner is not None:
        message += f"; its owner is {owner.router_id} at {owner.address}"
        known = {"router_id": owner.router_id, "address": owner.address}
        details.append(_error_info("NOT_OWNER", known))
    return _status(int(code_pb2.Code.Value(refused.code)), message, details)


def setting_status(error: SettingError) -> grpc.Status:
    """INVALID_ARGUMENT with a BadRequest that names the field under `policy`."""
    field = f"policy.{error.field}"
    violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=str(error))
    bad_request = error_details_pb2.BadRequest(field_violations=[violation])
    return _status(code_pb2.INVALID_ARGUMENT, f"policy.{error}", [_any(bad_request)])


def gateway_id_taken(gateway_id: str) -> grpc.Status:
    """ALREADY_EXISTS: another gateway has the id."""
    message = f"the gateway id {gateway_id!r} is another gateway's"
    return _status(code_pb2.ALREADY_EXISTS, message, [_error_info("GATEWAY_ID_IN_USE", {"gateway_id": gateway_id})])


def _error_info(reason: str, metadata: dict[str, str]) -> any_pb2.Any:
    return _any(error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN, metadata=metadata))


def _any(message: object) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)  # type: ignore[arg-type]
    return packed


def _status(code: int, message: str, details: list[any_pb2.Any]) -> grpc.Status:
    status: grpc.Status = rpc_status.to_status(status_pb2.Status(code=code, message=message, details=details))
    return status

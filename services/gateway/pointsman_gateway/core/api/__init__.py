"""The client APIs: parses bodies into ApiCalls, and writes errors in the format of the API that was called."""

from pointsman_gateway.core.api.api_call import ROUTES, ApiCall, ClientRules, Endpoint, error_format_of, with_fields
from pointsman_gateway.core.api.errors import (
    STREAM_FAILED,
    ApiRequestError,
    ErrorFormat,
    begins_with_error,
    error_event,
    redact_error,
    redact_error_event,
    reports_error,
    was_aborted,
    with_request_id,
)
from pointsman_gateway.core.api.parse import FORBIDDEN_FIELDS, FORBIDDEN_XARGS, chat_of, estimated_tokens, parse
from pointsman_gateway.core.api.prompt_length import ContextExceeded

__all__ = [
    "FORBIDDEN_FIELDS",
    "FORBIDDEN_XARGS",
    "ROUTES",
    "STREAM_FAILED",
    "ApiCall",
    "ApiRequestError",
    "ClientRules",
    "ContextExceeded",
    "Endpoint",
    "ErrorFormat",
    "begins_with_error",
    "chat_of",
    "error_event",
    "error_format_of",
    "estimated_tokens",
    "parse",
    "redact_error",
    "redact_error_event",
    "reports_error",
    "was_aborted",
    "with_fields",
    "with_request_id",
]

"""The APIs that clients speak: a body in, a Call out; errors in the form of the API that was called. Pure."""

from services.gateway.dialects.call import ROUTES, Call, Kind, Rules, form_of, with_fields
from services.gateway.dialects.errors import (
    CUT_SHORT,
    DialectError,
    Form,
    begins_with_error,
    engine_error,
    engine_event,
    error_event,
    given_up,
)
from services.gateway.dialects.parse import FORBIDDEN_FIELDS, FORBIDDEN_XARGS, estimated_tokens, parse

__all__ = [
    "CUT_SHORT",
    "FORBIDDEN_FIELDS",
    "FORBIDDEN_XARGS",
    "ROUTES",
    "Call",
    "DialectError",
    "Form",
    "Kind",
    "Rules",
    "begins_with_error",
    "engine_error",
    "engine_event",
    "error_event",
    "estimated_tokens",
    "form_of",
    "given_up",
    "parse",
    "with_fields",
]

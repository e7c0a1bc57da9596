"""What a router's gRPC errors mean, in words that say what to change."""

from __future__ import annotations

import grpc

NOTHING_LISTENS = "nothing listens there"
# What gRPC's details of UNAVAILABLE contain -> what that means.
_UNREACHED = (
    ("Connection refused", NOTHING_LISTENS),
    ("Domain name not found", "its host name is unknown"),
    ("errors resolving", "its host name is unknown"),
    (
        "Failed parsing HTTP/2",
        "what listens there is no router: HOST:PORT of its gRPC services is needed, by default port 50051",
    ),
    ("No route to host", "there is no route to its host"),
    ("CERTIFICATE_VERIFY_FAILED", "its certificate is not trusted: set POINTSMAN_TLS_CA"),
    ("SSL", "its TLS does not fit: see POINTSMAN_TLS_*"),
    ("Socket closed", "it closes the connection; if it has TLS, set POINTSMAN_TLS_CA"),
    ("connection attempt timed out", "its host does not answer"),
)
_REFUSED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)


def meaning(code: grpc.StatusCode, details: str, *roles: str) -> str:
    """Return what an error says of a router, as the end of a sentence that begins with its address. `roles`: whose token the
    caller may show, as in Tokens."""
    if code is grpc.StatusCode.UNAVAILABLE:
        return f"cannot be reached: {next((meaning for words, meaning in _UNREACHED if words in details), details)}"
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return "does not answer in time"
    if code in _REFUSED:
        tokens = ", ".join(f"POINTSMAN_{role.upper()}_TOKEN" for role in roles)
        return f"refuses this ({details}): set {tokens} or POINTSMAN_TOKEN_DIR"
    return f"answers {code.name}: {details}"

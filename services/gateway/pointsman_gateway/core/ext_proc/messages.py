"""Builds and reads the messages of Envoy's external processing (protos/pointsman/gateway/v1/ext_proc.proto). Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from pointsman.gateway.v1 import ext_proc_pb2 as pb
from pointsman_gateway.core.ext_proc.endpoints import DESTINATION, NAMESPACE
from pointsman_gateway.core.http_message import Headers, Response, without_controls

# Maximum size of a piece of a body, bytes: some proxies accept no more than 64 KiB.
PIECE_BYTES = 62_000
# Fields of a request that are the proxy's own. A client's are its proxy's to remove.
_OF_THE_PROXY = frozenset(
    {
        "host",
        "content-length",
        "transfer-encoding",
        "x-forwarded-for",
        "x-forwarded-host",
        "x-forwarded-port",
        "x-forwarded-proto",
        "x-forwarded-client-cert",
        "x-request-id",
    }
)
_OVERWRITE = pb.APPEND_ACTION_OVERWRITE_IF_EXISTS_OR_ADD


def fields_of(headers: pb.HeaderMap) -> list[tuple[str, str]]:
    """Return header fields in their order; their bytes become characters as in Latin-1."""
    return [
        (field.key, field.raw_value.decode("latin-1") if field.raw_value else field.value) for field in headers.headers
    ]


def head_of(fields: Iterable[tuple[str, str]]) -> tuple[dict[str, str], Headers]:
    """Return the pseudo-headers, and the header fields."""
    pseudo, headers = {}, Headers()
    for name, value in fields:
        if name.startswith(":"):
            pseudo[name] = value
        else:
            headers.add(name, value)
    return pseudo, headers


def destination(endpoints: Sequence[str], received: Iterable[str], fields: Mapping[str, str]) -> pb.ProcessingResponse:
    """Return the answer to a request's head: it goes to the first of `endpoints`, or to the next ones if that does not answer.
    `received`: names of the fields that the request has; `fields`: those that it gets. All others are removed."""
    to = ",".join(endpoints)
    # The route is not chosen anew: it may match fields that are removed here.
    common = pb.CommonResponse(
        header_mutation=_mutation({**fields, DESTINATION: to}, removed=_not_kept(received, fields)),
    )
    answer = pb.ProcessingResponse(request_headers=pb.HeadersResponse(response=common))
    answer.dynamic_metadata.get_or_create_struct(NAMESPACE)[DESTINATION] = to
    return answer


def _not_kept(received: Iterable[str], fields: Mapping[str, str]) -> Iterator[str]:
    kept = {name.lower() for name in fields}
    return (name for name in dict.fromkeys(received) if name not in kept and not _is_of_the_proxy(name))


def _is_of_the_proxy(name: str) -> bool:
    return name in _OF_THE_PROXY or name.startswith((":", "x-envoy-"))


def request_body(body: bytes, *, last: bool) -> Iterator[pb.ProcessingResponse]:
    """Return the messages with a request's body. `last`: no trailers follow."""
    for piece in _pieces(body, last):
        yield pb.ProcessingResponse(request_body=piece)


def response_head(status: int | None, received: Iterable[str], fields: Mapping[str, str]) -> pb.ProcessingResponse:
    """Return the answer to a response's head, whose fields become `fields`. `status`: its new status, None for its own."""
    kept = {name.lower() for name in fields}
    removed = [name for name in dict.fromkeys(received) if name not in kept and name != "date" and name[:1] != ":"]
    changed = {**fields} if status is None else {**fields, ":status": str(status)}
    common = pb.CommonResponse(header_mutation=_mutation(changed, removed))
    return pb.ProcessingResponse(response_headers=pb.HeadersResponse(response=common))


def response_body(body: bytes, *, last: bool) -> Iterator[pb.ProcessingResponse]:
    """Return the messages with a part of a response's body."""
    for piece in _pieces(body, last):
        yield pb.ProcessingResponse(response_body=piece)


def _pieces(body: bytes, last: bool) -> Iterator[pb.BodyResponse]:
    """Return `body` in pieces, at least one. `last`: its end is the end of the stream."""
    for at in range(0, max(len(body), 1), PIECE_BYTES):
        end = at + PIECE_BYTES
        piece = pb.StreamedBodyResponse(body=body[at:end], end_of_stream=last and end >= len(body))
        yield pb.BodyResponse(response=pb.CommonResponse(body_mutation=pb.BodyMutation(streamed_response=piece)))


def immediate(response: Response, fields: Mapping[str, str], details: str) -> pb.ProcessingResponse:
    """Return the message by which the proxy answers the client itself. `fields`: header fields besides the response's."""
    return pb.ProcessingResponse(
        immediate_response=pb.ImmediateResponse(
            status=pb.HttpStatus(code=response.status),
            headers=_mutation({**response.headers, **fields}, ()),
            body=response.body,
            details=details,
        )
    )


def _mutation(fields: Mapping[str, str], removed: Iterable[str]) -> pb.HeaderMutation:
    return pb.HeaderMutation(
        set_headers=[
            pb.HeaderValueOption(
                header=pb.HeaderValue(key=name.lower(), raw_value=without_controls(value).encode("latin-1", "replace")),
                append_action=_OVERWRITE,
            )
            for name, value in fields.items()
        ],
        remove_headers=removed,
    )

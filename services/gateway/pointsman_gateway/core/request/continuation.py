"""Continues an answer whose instance is gone at another instance.

An engine with the connector package tells before each event of a stream the token ids that the event stands for, in an SSE
comment (connector/pointsman_connector/answer_record.py). A request that has the answer record is answered with what follows, by
an engine with the package. Pure.
"""

from __future__ import annotations

import re
from array import array

from pointsman.router.v1 import placement_pb2
from pointsman_common.core.block_keys import KEY_TOKENS, extend_keys
from pointsman_common.core.engine_identity_wire import identity_to_wire
from pointsman_gateway.core.api import with_fields
from pointsman_gateway.core.api.continuable import RECORD_FIELD
from pointsman_gateway.core.request.request_context import RequestContext
from pointsman_gateway.core.tokens.token_cache import TokenIds

_IDS = re.compile(rb"\d{1,9}")  # no vocabulary has more tokens, and a longer number is no id


def with_answer_record(payload: bytes, record: bytes) -> bytes:
    """Return the body of a request that asks its engine for token ids, and to go on after the answer of `record`, if any."""
    return with_fields(payload, {"vllm_xargs": {RECORD_FIELD: record.decode("ascii")}})


def ids_of(record: bytes) -> TokenIds:
    """Return the token ids of an answer record."""
    return array("I", map(int, _IDS.findall(record)))


def copy_of(placement: placement_pb2.PlacementRequest) -> placement_pb2.PlacementRequest:
    """Return a copy of a placement request, for one attempt."""
    request = placement_pb2.PlacementRequest()
    request.CopyFrom(placement)
    return request


def continued_placement(context: RequestContext, ids: TokenIds) -> placement_pb2.PlacementRequest:
    """Return the placement request for the rest of an answer: the prompt and the answer so far (`ids`) are its prompt."""
    request = copy_of(context.placement)
    request.input_tokens += len(ids)
    if request.max_output_tokens:
        request.max_output_tokens = max(request.max_output_tokens - len(ids), 1)
    if context.rest is not None and request.keys:
        rest = context.rest + ids
        if len(rest) >= KEY_TOKENS:
            request.keys.extend(extend_keys(request.keys[-1], rest))
    # It has its place in the fleet: it goes on, and no other instance computes a part of it.
    request.continues_session = request.single_instance = request.resumed = True
    request.sliceable_tokens = 0
    if request.longest_prompt_tokens:
        request.longest_prompt_tokens += len(ids)
    if (answered_by := identity_to_wire(context.answered_by)) is not None:
        request.begun_by.CopyFrom(answered_by)
    request.ClearField("ttft_deadline")
    return request

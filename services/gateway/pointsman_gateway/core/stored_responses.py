"""Responses that engines store: ids that name the engine, and where a response is by its id. Pure.

vLLM keeps responses in the memory of the server that generated them (`VLLM_ENABLE_RESPONSES_API_STORE=1`), so a request that
continues, reads or cancels a response must reach that server, and its end is that of its responses. The id identifies the server:
the gateway sets `request_id`, which vLLM uses as the response's id.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from pointsman.router.v1 import placement_pb2
from pointsman_gateway.core.api.errors import ApiRequestError
from pointsman_gateway.core.json_object import json_object

_ID = re.compile(r"resp_([0-9a-f]{12})([0-9a-f]{8})([0-9a-f]{8})[0-9a-f]{24}")
# Retry-After while the engine of a response takes no requests, s: longer than a failed probe or a change of adapters lasts.
_RETRY_S = 5.0
_LOST = "response_lost"  # code of the error if the engine that stored it is gone


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """Where the response `id` is stored. `pool` of the instance. `placeable`: whether the instance gets requests now."""

    id: str
    pool: str
    instance: placement_pb2.InstanceRef
    placeable: bool

    def missing(self, incarnation: str) -> ApiRequestError:
        """Return the error if the instance, of which this is the incarnation, answers that it has no such response."""
        found = _ID.fullmatch(self.id)
        if found is not None and found[3] != _tag(incarnation, 8):
            return not_stored(self.id, "its engine has restarted since.", _LOST)
        return not_stored(self.id)

    def unavailable(self) -> ApiRequestError:
        """Return the error for a request that only the instance could answer, if it gets no requests now."""
        return ApiRequestError(
            503,
            f"The engine that stores the response '{self.id}' takes no requests now.",
            param="response_id",
            code="response_unavailable",
            retry_after_s=_RETRY_S,
        )


def response_id(instance_id: str, incarnation: str, tenant: str, request_id: str) -> str:
    """Return an id for a response that `instance_id` will store. Any gateway can find the instance and check the tenant by it.
    `request_id` (32 random hex digits) makes the id unguessable."""
    return f"resp_{_tag(instance_id, 12)}{_tag(tenant, 8)}{_tag(incarnation, 8)}{request_id[:24]}"


def find(id_: str, tenant: str, pools: Iterable[placement_pb2.Pool], *, complete: bool) -> StoredResponse:
    """Return where the response `id_` is stored. `complete`: whether `pools` are certainly the whole fleet.

    Raises ApiRequestError if none of the instances stores it, or if it is another tenant's. A forged tag gives no access: the
    engine finds a response only by its whole id.
    """
    found = _ID.fullmatch(id_)
    if found is None or found[2] != _tag(tenant, 8):
        raise not_stored(id_)
    for pool in pools:
        for instances in (pool.instances, pool.other_instances):
            for instance in instances:
                if _tag(instance.instance_id, 12) == found[1]:
                    return StoredResponse(id_, pool.model, instance, placeable=instances is pool.instances)
    if complete:
        raise not_stored(id_, "its engine has left the fleet.", _LOST)
    raise ApiRequestError(503, "The fleet is not known yet.", code="no_instance")


def not_stored(id_: str, why: str = "", code: str = "not_found") -> ApiRequestError:
    """Return the error for a response that no instance has, or that is another tenant's."""
    text = f"Response with id '{id_}' not found" + (f": {why}" if why else ".")
    return ApiRequestError(404, text, param="response_id", code=code)


def says_not_stored(body: bytes) -> bool:
    """Return whether the body of an engine's 404 says that it has no such response, and not that it has no such model."""
    error = json_object(body).get("error")
    return isinstance(error, dict) and error.get("param") == "response_id"


@lru_cache(maxsize=16_384)
def _tag(text: str, digits: int) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:digits]

"""What this package relies on inside vLLM, checked when it is loaded: a clear error instead of wrong KV."""

from __future__ import annotations

import inspect

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector as upstream

TESTED = "0.32"

# Methods that are overridden or called here, with their parameters.
_SHAPES: dict[str, dict[str, tuple[str, ...]]] = {
    "MooncakeConnectorScheduler": {
        "update_state_after_alloc": ("request", "blocks", "num_external_tokens"),
        "build_connector_meta": ("scheduler_output",),
        "request_finished": ("request", "block_ids"),
    },
    "MooncakeConnectorWorker": {
        "send_kv_to_decode": ("identity", "sock", "meta"),
        "record_send_reqs": ("metadata",),
        "fetch_finished_sending_reqs": (),
        "start_load_kv": ("metadata",),
        "get_transfer_results": (),
        "process_pulling_result": ("response", "pull_metas"),
        "receive_kv_from_single_worker": ("worker_addr", "pull_metas"),
        "_sender_worker": ("sock",),
        "_handle_failed_recv": ("pull_metas", "req_ids", "reason"),
        "_build_transfer_params": ("ready_reqs", "agent_meta", "local_regions", "remote_regions"),
        "_prepare_transfer_regions": ("meta",),
        "_send_blocks": ("remote_session", "src_ptrs", "dst_ptrs", "lengths"),
    },
    "SendBlockMeta": {
        "__init__": (
            "p_req_id",
            "transfer_id",
            "local_block_ids",
            "ready",
            "expire_time",
            "need_send",
            "sent",
            "sending",
        )
    },
}


class VllmMoved(RuntimeError):
    """This vLLM's MooncakeConnector is not the one that layer-wise push was written for; `differences` says where."""

    def __init__(self, differences: list[str]) -> None:
        import vllm

        super().__init__(
            f"layer-wise push was written for vLLM {TESTED}, this is {vllm.__version__} and differs: {'; '.join(differences)}. "
            'Set "layerwise": false in kv_connector_extra_config to run without it.'
        )
        self.differences = differences


def check() -> None:
    """Raises VllmMoved unless everything that is overridden or called has the shape that it had when this was written."""
    if found := differences():
        raise VllmMoved(found)


def differences() -> list[str]:
    """What is missing or takes other parameters than expected."""
    found = []
    for class_name, methods in _SHAPES.items():
        owner = getattr(upstream, class_name, None)
        if owner is None:
            found.append(f"no {class_name}")
            continue
        for name, expected in methods.items():
            method = getattr(owner, name, None)
            if method is None:
                found.append(f"no {class_name}.{name}")
            elif (actual := tuple(inspect.signature(method).parameters)[1:]) != expected:
                found.append(f"{class_name}.{name} takes {', '.join(actual) or 'nothing'}")
    return found

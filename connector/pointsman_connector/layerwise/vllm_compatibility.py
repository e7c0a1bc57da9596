"""Checks at load time that vLLM's internals are those that this package uses, so that a change is an error instead of wrong
KV."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType

from pointsman_connector.vllm_version import TESTED, running

# vLLM's modules with what this package overrides, calls and reads.
_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_UPSTREAM = "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector"
_OUTPUT = "vllm.v1.core.sched.output"

# Methods that this package overrides or calls, with their parameters.
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
        "register_kv_caches": ("kv_caches",),
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

# Hooks that the engine must call with these parameters.
_HOOKS: dict[str, tuple[str, ...]] = {
    "bind_connector_metadata": ("connector_metadata",),
    "wait_for_save": (),
    "save_kv_layer": ("layer_name", "kv_layer", "attn_metadata", "kwargs"),
    "get_transfer_results": ("finished_req_ids",),
    "requires_piecewise_for_cudagraph": ("extra_config",),
}
# Fields of the engine's messages that this package reads.
_READ: dict[str, tuple[str, ...]] = {
    "SchedulerOutput": (
        "num_scheduled_tokens",
        "total_num_scheduled_tokens",
        "kv_connector_block_state",
        "preempted_req_ids",
    ),
}
# All fields of the messages between two engines: a further one means that the engines agree on something that this package does
# not know. vLLM 0.33 has the same methods, but a receiver leaves out its memory's layout if the sender has it.
_MESSAGES: dict[str, tuple[str, ...]] = {
    "MooncakeXferMetadata": (
        "remote_hostname",
        "remote_port",
        "remote_tp_size",
        "remote_tp_rank",
        "req_blocks",
        "kv_caches_base_addr",
        "block_lens",
        "kv_block_lens",
        "registered_layer_names",
        "registered_layer_indices",
        "registered_group_indices",
        "registered_shared_group_ids",
        "registered_row_offsets",
        "remote_pp_size",
    ),
    "MooncakeXferResponse": ("status", "ok_reqs", "err_reqs", "err_msg"),
    "MooncakeXferResponseStatus": ("FINISH", "CONTINUE", "ERROR"),
    "PullReqMeta": (
        "d_req_id",
        "transfer_id",
        "local_block_ids",
        "remote_engine_id",
        "remote_bootstrap_addr",
        "expire_time",
        "pull_tasks_count",
        "failed",
    ),
}
# Attributes of a MooncakeConnectorWorker that may send.
_KEPT = (
    "reqs_need_send",
    "finished_sending_reqs",
    "sender_loop",
    "sender_worker_queue",
    "_sender_executor",
    "_encoder",
    "_xfer_meta_decoder",
    "_xfer_resp_decoder",
    "_layer_specs",
    "_physical_blocks_per_logical_kv_block",
    "block_len_per_layer",
    "registered_layer_names",
    "kv_caches_base_addr",
    "kv_block_len_per_layer",
    "transfer_topo",
    "xfer_stats",
)
# Methods of its transfer engine that this package calls.
_ENGINE = ("batch_transfer_sync_write", "batch_transfer_async_write", "get_batch_transfer_status")


class IncompatibleVllm(RuntimeError):
    """This vLLM's MooncakeConnector differs from the one that layer-wise push was written for; `differences` lists where."""

    def __init__(self, differences: list[str], remedy: str = "") -> None:
        remedy = remedy or 'Set "layerwise": false in kv_connector_extra_config to run without it.'
        super().__init__(
            f"layer-wise push was written for vLLM {TESTED}, this is {running()} and differs: {'; '.join(differences)}. {remedy}"
        )
        self.differences = differences


@contextmanager
def imports() -> Iterator[None]:
    """Context manager for the imports of a connector's module: raises IncompatibleVllm, with one line that names what is missing,
    if this vLLM has other modules or names."""
    try:
        yield
    except IncompatibleVllm:
        raise
    except Exception as error:
        remedy = 'Use vLLM\'s own "kv_connector": "MooncakeConnector" to run without it.'
        raise IncompatibleVllm([f"{type(error).__name__}: {error}"], remedy) from error


def check() -> None:
    """Raise IncompatibleVllm unless all methods and fields that this package uses are as expected."""
    if found := differences():
        raise IncompatibleVllm(found)


def check_worker(worker: object) -> None:
    """Raise IncompatibleVllm unless a new upstream worker has the attributes that this package uses. The worker must be one that
    may send."""
    engine = getattr(worker, "engine", None)
    missing = [f"no MooncakeConnectorWorker.{name}" for name in _KEPT if not hasattr(worker, name)]
    if missing := missing + [f"no TransferEngine.{name}" for name in _ENGINE if not hasattr(engine, name)]:
        raise IncompatibleVllm(missing)


def differences() -> list[str]:
    """Return one text for each method or field that is missing, has unexpected parameters, or is new in a message."""
    base, upstream, output = (_module(name) for name in (_BASE, _UPSTREAM, _OUTPUT))
    found = []
    for class_name, methods in _SHAPES.items():
        found += _changed(upstream, class_name, methods)
    found += _changed(base, "KVConnectorBase_V1", _HOOKS)
    for class_name, names in _READ.items():
        fields = _fields(output, class_name)
        found += [f"no {class_name}.{name}" for name in names if name not in fields]
    for class_name, names in _MESSAGES.items():
        fields = _fields(upstream, class_name)
        found += [f"no {class_name}.{name}" for name in names if name not in fields]
        found += [f"{class_name} has {name}" for name in fields if name not in names]
    return found


def _fields(module: ModuleType | None, class_name: str) -> list[str]:
    """Return the fields of a message, or the members of an enumeration."""
    owner = getattr(module, class_name, None)
    return list(getattr(owner, "__members__", None) or getattr(owner, "__annotations__", {}))


def _module(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _changed(module: ModuleType | None, class_name: str, methods: Mapping[str, tuple[str, ...]]) -> list[str]:
    owner = getattr(module, class_name, None)
    if owner is None:
        return [f"no {class_name}"]
    found = []
    for name, expected in methods.items():
        method = getattr(owner, name, None)
        if method is None:
            found.append(f"no {class_name}.{name}")
            continue
        actual = tuple(name for name in inspect.signature(method).parameters if name != "self")
        if actual != expected:
            found.append(f"{class_name}.{name} takes {', '.join(actual) or 'nothing'}")
    return found

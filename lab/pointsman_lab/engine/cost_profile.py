"""The cost of an engine's steps and KV transfers, and its JSON file."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
from xxhash import xxh3_64_intdigest

SHIPPED = Path(__file__).parents[1] / "data"
# The costs of steps; the other costs are those of transfers.
STEP_COSTS = (
    "step_s",
    "prefill_token_s",
    "prefill_pair_s",
    "prefill_kv_token_s",
    "decode_sequence_s",
    "decode_kv_token_s",
    "wake_s",
)
# The costs of transfers to and from the tiers below an engine's own cache.
TIER_COSTS = ("host_s", "host_token_s", "storage_s", "storage_token_s")
# Engine settings that can be learned from outside.
ENGINE_FIELDS = ("block_size", "kv_blocks", "max_model_len", "max_num_batched_tokens")


class ProfileError(ValueError):
    """A profile that cannot be used; the message names file and field."""


@dataclass(frozen=True)
class Profile:
    """The cost of steps and transfers, in seconds.

    A chunk of n tokens after c computed ones takes prefill_token_s * n + prefill_pair_s * n * (2c + n), so that a prompt of
    N costs a*N + b*N^2 in any division into chunks. A chunk also takes prefill_kv_token_s * c: the KV before a chunk is read once
    for the chunk, however short it is. On CPU this is a large part of the cost of few new tokens after a long cached prefix.
    prefill_kv_token_s is 0 where computing hides that time, as in the profiles that ship. The first step after an idle period
    takes wake_s longer: threads sleep, clocks are low, caches are cold. wake_s is 0 in the profiles that ship.

    The defaults are fitted at 8k and 64k to prefill times measured with a 30B MoE
    coder model on a data-centre GPU (reference 0.575, 1.495, 4.44 and 15.2 s at 8k, 16k, 32k and 64k; this gives 0.575,
    1.53, 4.57 and 15.2), and decode to its 6-8 ms/token: 96 KiB of KV per token read at 3 TB/s, plus the weights.
    """

    step_s: float = 0.005  # per step that computes anything
    prefill_token_s: float = 4.708e-5  # per token of a chunk
    prefill_pair_s: float = 2.8205e-9  # per pair of a token and one that it attends to, pairs counted twice
    decode_sequence_s: float = 5e-5  # per sequence and decode step
    decode_kv_token_s: float = 3.3e-8  # per token of a sequence's KV and decode step
    prefill_kv_token_s: float = 0.0  # per computed token before a chunk, once for each chunk
    wake_s: float = 0.0  # once, in the first step after an idle period
    # Time of a KV transfer between instances after its prefill, and the time that a layer-wise push still takes then. Fitted to
    # the reference's 0.123, 0.202 and 0.529 s at 8k, 16k and 32k (this gives 0.13, 0.26 and 0.50) and 0.058 s layer-wise.
    transfer_s: float = 0.010
    transfer_token_s: float = 1.5e-5  # per token
    layerwise_tail_s: float = 0.058  # minimum time of a push after its prefill
    # Time of a transfer between the engine's own cache and host memory, and between host memory and shared storage. These are
    # assumed, not measured: 96 KiB of KV per token at 25 GB/s (PCIe 4 x16, or 40 % of PCIe 5 x16), and at 5 GB/s per instance.
    host_s: float = 0.002
    host_token_s: float = 4.0e-6  # per token
    storage_s: float = 0.010  # per transfer between host memory and storage
    storage_token_s: float = 2.0e-5  # per token

    def chunk_s(self, tokens: int, computed: int) -> float:
        """Return the seconds for `tokens` tokens of one sequence after `computed` ones; one token is a decode step."""
        if tokens == 1:
            return self.decode_sequence_s + self.decode_kv_token_s * computed
        pairs_s = self.prefill_pair_s * tokens * (2 * computed + tokens)
        return self.prefill_token_s * tokens + pairs_s + self.prefill_kv_token_s * computed

    def decode_step_s(self, batch: int, kv_tokens: float) -> float:
        """Return the seconds of a step in which `batch` sequences, with `kv_tokens` of KV in total, get one token each."""
        return self.step_s + self.decode_sequence_s * batch + self.decode_kv_token_s * kv_tokens

    def transfer_time_s(self, tokens: int) -> float:
        """Return the seconds to move the KV of `tokens` tokens to another instance."""
        return self.transfer_s + self.transfer_token_s * tokens

    def transfer_tail_s(self, tokens: int, overlapped_s: float) -> float:
        """Return the seconds from a prefill's end until the KV of `tokens` tokens is on the other instance.

        The KV is pushed layer by layer during the prefill's last `overlapped_s` (0: fetched afterwards). A push saves at most
        `overlapped_s`, always leaves the last layer, and never takes longer than a fetch.
        """
        whole = self.transfer_time_s(tokens)
        if not overlapped_s:
            return whole
        return min(whole, max(self.layerwise_tail_s, whole - overlapped_s))

    def slowed(self, factor: float) -> Profile:
        """Return a profile whose steps take `factor` times as long; transfers are unchanged."""
        return replace(self, **{name: getattr(self, name) * factor for name in STEP_COSTS})

    @property
    def nonzero(self) -> dict[str, float]:
        """All costs that are not 0, by field. Equal for two profiles of equal costs, even if one has more fields."""
        return {name: value for name, value in asdict(self).items() if value}

    @property
    def name(self) -> str:
        """A hash of the costs: two profiles of the same name have equal costs."""
        return f"{xxh3_64_intdigest(msgspec.json.encode(self.nonzero)):016x}"[:8]


class ProfileFile(msgspec.Struct, kw_only=True):
    """A profile as stored in a file: costs, and if measured, the engine's settings and the quality of the fit.

    `engine` has EngineConfig's fields as far as they are known. `about` is for people; no code reads it.
    """

    costs: Profile = Profile()
    engine: dict[str, int] = {}
    about: dict[str, Any] = {}

    def encode(self) -> bytes:
        """Return the file's content: one JSON object, with the costs on its top level."""
        whole = asdict(self.costs) | {"engine": self.engine, "about": self.about}
        return msgspec.json.format(msgspec.json.encode(whole), indent=2) + b"\n"


def find_profile(named: Path) -> Path:
    """Return a profile's file. `named` is its path, or a bare name if it ships with the lab ("reference", "slow")."""
    shipped = SHIPPED / f"{named}.json"
    return shipped if not named.exists() and len(named.parts) == 1 and shipped.exists() else named


def read_profile(named: Path) -> ProfileFile:
    """Read a profile (found by find_profile): a JSON object of Profile's fields, in s. Missing fields have their defaults.

    The object may also have `engine` and `about`. Raises ProfileError.
    """
    path = find_profile(named)
    try:
        values = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        engine = msgspec.convert(values.pop("engine", {}), dict[str, Annotated[int, msgspec.Meta(ge=1)]])
        about = msgspec.convert(values.pop("about", {}), dict[str, Any])
        costs = msgspec.convert(values, dict[str, float])
    except (OSError, msgspec.MsgspecError) as error:
        raise ProfileError(f"{path}: {error}") from error
    _check_names(path, costs, {field.name for field in fields(Profile)})
    _check_names(path, engine, ENGINE_FIELDS)
    for name, value in costs.items():
        if value < 0 or not math.isfinite(value):
            raise ProfileError(f"{path}: {name}: {value:g} is not a duration")
    return ProfileFile(costs=Profile(**costs), engine=engine, about=about)


def load_profile(named: Path) -> Profile:
    """Return the costs of a profile. Raises ProfileError."""
    return read_profile(named).costs


def _check_names(path: Path, given: Iterable[str], known: Iterable[str]) -> None:
    for name in given:
        if name not in known:
            raise ProfileError(f"{path}: {name}: there is no such field")

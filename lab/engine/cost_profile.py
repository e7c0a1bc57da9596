"""What an engine's steps and its KV transfers cost, and the file that says so."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
from xxhash import xxh3_64_intdigest

SHIPPED = Path(__file__).parents[1] / "data"
# The costs of steps; the others are those of transfers.
STEP_COSTS = (
    "step_s",
    "prefill_token_s",
    "prefill_pair_s",
    "prefill_kv_token_s",
    "decode_sequence_s",
    "decode_kv_token_s",
    "wake_s",
)
# What can be learned of an engine from outside.
ENGINE_FIELDS = ("block_size", "kv_blocks", "max_model_len", "max_num_batched_tokens")


class ProfileError(ValueError):
    """A profile that cannot be used; the message names file and field."""


@dataclass(frozen=True)
class Profile:
    """What a step costs, in seconds.

    A chunk of n tokens after c computed ones takes prefill_token_s * n + prefill_pair_s * n * (2c + n), so that a prompt of
    N costs a*N + b*N^2 however it is cut, and prefill_kv_token_s * c: the KV of what is before a chunk is fetched once for it,
    however short it is. On CPU that is much of what few new tokens after a long cached prefix cost; where it hides behind the
    computing it is 0, as in the profiles that ship. The first step after there was nothing to do takes wake_s longer: threads
    sleep, clocks are down, caches have gone cold; 0 in the profiles that ship.

    The defaults are fitted at 8k and 64k to prefill times measured with a 30B MoE
    coder model on a data-centre GPU (reference 0.575, 1.495, 4.44 and 15.2 s at 8k, 16k, 32k and 64k; this gives 0.575,
    1.53, 4.57 and 15.2), and decode to its 6-8 ms/token: 96 KiB of KV per token read at 3 TB/s, plus the weights.
    """

    step_s: float = 0.005
    prefill_token_s: float = 4.708e-5
    prefill_pair_s: float = 2.8205e-9
    decode_sequence_s: float = 5e-5
    decode_kv_token_s: float = 3.3e-8
    prefill_kv_token_s: float = 0.0
    wake_s: float = 0.0
    # A KV transfer between instances once its prefill is over, and what a layer-wise push leaves to do then. Fitted to the
    # reference's 0.123, 0.202 and 0.529 s at 8k, 16k and 32k (this gives 0.13, 0.26 and 0.50) and 0.058 s layer-wise.
    transfer_s: float = 0.010
    transfer_token_s: float = 1.5e-5
    layerwise_tail_s: float = 0.058

    def chunk_s(self, tokens: int, computed: int) -> float:
        """Seconds for `tokens` of one sequence after `computed`; one token is a decode step."""
        if tokens == 1:
            return self.decode_sequence_s + self.decode_kv_token_s * computed
        pairs_s = self.prefill_pair_s * tokens * (2 * computed + tokens)
        return self.prefill_token_s * tokens + pairs_s + self.prefill_kv_token_s * computed

    def decode_step_s(self, batch: int, kv_tokens: float) -> float:
        """Seconds of a step in which `batch` sequences with `kv_tokens` of KV together get a token each."""
        return self.step_s + self.decode_sequence_s * batch + self.decode_kv_token_s * kv_tokens

    def transfer_time_s(self, tokens: int) -> float:
        """Seconds to move the KV of `tokens` to another instance."""
        return self.transfer_s + self.transfer_token_s * tokens

    def transfer_tail_s(self, tokens: int, overlapped_s: float) -> float:
        """Seconds from a prefill's end until `tokens` of KV are elsewhere, pushed layer by layer during its last `overlapped_s`
        (0: fetched afterwards). A push hides no more than that, always leaves its last layer, and is never the slower way."""
        whole = self.transfer_time_s(tokens)
        if not overlapped_s:
            return whole
        return min(whole, max(self.layerwise_tail_s, whole - overlapped_s))

    def slowed(self, factor: float) -> Profile:
        """One whose steps take `factor` times as long; transfers take what they took."""
        return replace(self, **{name: getattr(self, name) * factor for name in STEP_COSTS})

    @property
    def nonzero(self) -> dict[str, float]:
        """What costs anything, by its field: the same for two profiles that cost the same, though one may know of more costs."""
        return {name: value for name, value in asdict(self).items() if value}

    @property
    def name(self) -> str:
        """What its content is called: two profiles of one name cost the same."""
        return f"{xxh3_64_intdigest(msgspec.json.encode(self.nonzero)):016x}"[:8]


class ProfileFile(msgspec.Struct, kw_only=True):
    """A profile as it is kept: costs, and where it was measured what the engine is and how well they fit.

    `engine` has EngineConfig's fields as far as they are known. `about` is for people: nothing reads it.
    """

    costs: Profile = Profile()
    engine: dict[str, int] = {}
    about: dict[str, Any] = {}

    def encode(self) -> bytes:
        """The file: one JSON object, the costs on its top level."""
        whole = asdict(self.costs) | {"engine": self.engine, "about": self.about}
        return msgspec.json.format(msgspec.json.encode(whole), indent=2) + b"\n"


def find_profile(named: Path) -> Path:
    """The file of a profile that is named by its path, or by a bare name if it ships with the lab ("reference", "slow")."""
    shipped = SHIPPED / f"{named}.json"
    return shipped if not named.exists() and len(named.parts) == 1 and shipped.exists() else named


def read_profile(named: Path) -> ProfileFile:
    """Read a profile (as find_profile finds it): a JSON object of Profile's fields, in s; missing ones keep their defaults.

    Beside them it may have `engine` and `about`. Raises ProfileError.
    """
    path = find_profile(named)
    try:
        values = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        engine = msgspec.convert(values.pop("engine", {}), dict[str, Annotated[int, msgspec.Meta(ge=1)]])
        about = msgspec.convert(values.pop("about", {}), dict[str, Any])
        costs = msgspec.convert(values, dict[str, float])
    except (OSError, msgspec.MsgspecError) as error:
        raise ProfileError(f"{path}: {error}") from error
    _check_names(path, costs, {one.name for one in fields(Profile)})
    _check_names(path, engine, ENGINE_FIELDS)
    for name, value in costs.items():
        if value < 0 or not math.isfinite(value):
            raise ProfileError(f"{path}: {name}: {value:g} is no time")
    return ProfileFile(costs=Profile(**costs), engine=engine, about=about)


def load_profile(named: Path) -> Profile:
    """The costs of a profile. Raises ProfileError."""
    return read_profile(named).costs


def _check_names(path: Path, given: Iterable[str], known: Iterable[str]) -> None:
    for name in given:
        if name not in known:
            raise ProfileError(f"{path}: {name}: there is no such field")

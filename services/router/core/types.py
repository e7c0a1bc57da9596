"""What the router thinks in: instances, requests, views, plans and decisions. Immutable values, no behaviour. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

import msgspec

from pointsman.router.core.prefill_curve import NO_PREFILLS, PrefillCurve, PrefillSums, PrefillWork
from pointsman.router.core.priority import Priority

LIGHT_CACHE_RATIO = 0.5
LIGHT_NEW_TOKENS = 5_000
HEAVY_NEW_TOKENS = 20_000
# So many of an instance's open prefills are told one by one, and as many remainders of prompts; a policy that holds requests lets
# few come to be open. What a decision costs, and what its record holds, does not grow with those beyond.
LISTED_PREFILLS = 16


class InstanceState(StrEnum):
    """Whether an instance can be placed on, and whether its keys count (see FleetService.InstanceState)."""

    SYNCING = "SYNCING"
    READY = "READY"
    UNHEALTHY = "UNHEALTHY"
    LOST = "LOST"
    DRAINING = "DRAINING"
    CORDONED = "CORDONED"


class PrefixSource(StrEnum):
    """Where an instance's cached tokens are known from: its own EVENTS, the router's own placements (APPROXIMATE), or NONE: its
    cache counts as empty."""

    EVENTS = "EVENTS"
    APPROXIMATE = "APPROXIMATE"
    NONE = "NONE"


class StepKind(StrEnum):
    """What an instance is asked to do."""

    PREFILL = "PREFILL"
    SERVE = "SERVE"


class Phase(StrEnum):
    """How far a running request is: before or after its first token."""

    PREFILL = "PREFILL"
    DECODE = "DECODE"


class KvRole(StrEnum):
    """Which sides of a KV transfer an engine can be."""

    BOTH = "BOTH"
    PRODUCER = "PRODUCER"
    CONSUMER = "CONSUMER"


class KvTransfer(msgspec.Struct, frozen=True, gc=False):
    """How an engine passes KV on: the protocol of its connector (MOONCAKE, NIXL), its bootstrap server's base URL, and the sides
    that it can be. KV goes between equal `cache_dtype` only. `layerwise`: it wants both requests of a transfer at once."""

    protocol: str
    bootstrap_url: str = ""
    role: KvRole = KvRole.BOTH
    cache_dtype: str = ""
    layerwise: bool = False


class InstanceInfo(msgspec.Struct, frozen=True, gc=False):
    """One engine (one data-parallel rank of it) during one incarnation, as its agent described it.

    `block_size`, `kv_capacity_tokens` and `max_model_len` are in tokens; the latter two are 0 when unknown. `hardware` is one
    word for all instances that compute equally fast. `long_prefill_token_threshold` is the engine's own limit, in
    tokens; 0: none is known.
    """

    instance_id: str
    incarnation: str
    url: str
    model: str
    served_names: tuple[str, ...] = ()
    lora_names: tuple[str, ...] = ()
    model_root: str = ""
    block_size: int = 16
    kv_capacity_tokens: int = 0
    max_model_len: int = 0
    data_parallel_rank: int | None = None
    exact_prefix: bool = True
    prefix_reason: str = ""
    engine_version: str = ""
    node: str = ""
    kv_transfer: KvTransfer | None = None
    hardware: str = ""
    long_prefill_token_threshold: int = 0


class Gpu(msgspec.Struct, frozen=True, gc=False):
    """One sample of one device: utilisation 0 to 1, memory in bytes."""

    index: int
    utilisation: float
    memory_used: int
    memory_total: int


class Load(msgspec.Struct, frozen=True, gc=False):
    """The engine's own figures. `sampled_at` is on the router's clock, in s; counters run from the engine's start."""

    sampled_at: float
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    generation_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    external_prefix_cache_queries: int = 0
    external_prefix_cache_hits: int = 0
    preemptions: int = 0
    healthy: bool = True
    gpus: tuple[Gpu, ...] = ()


class PlacementRequest(msgspec.Struct, frozen=True, gc=False):
    """What a placement is decided on. `keys` name the prompt's full 16-token blocks (pointsman.common.core.block_keys).

    `age_s`: how long it has waited for its first step already (or, between two steps, since it came). `deadline_s`: how much
    longer its gateway waits. `sliceable_tokens`: of how many tokens at most its gateway can have a prefix of its prompt computed.
    `single_instance`: no other instance may prefill for the one that answers. `priority` and `weight`: the class that its
    client's key has, and its tenant's share of the class. `ttft_deadline_s`: how soon its client needs the first token.
    """

    request_id: str
    model: str
    input_tokens: int
    keys: Sequence[int] = ()
    tenant: str = ""
    session_id: str = ""
    max_output_tokens: int = 0
    exclude: tuple[str, ...] = ()
    deadline_s: float | None = None
    age_s: float = 0.0
    sliceable_tokens: int = 0
    single_instance: bool = False
    priority: Priority = Priority.STANDARD
    weight: float = 1.0
    ttft_deadline_s: float | None = None

    @property
    def session(self) -> str:
        """The session's name across tenants; empty when it has none."""
        return f"{self.tenant}/{self.session_id}" if self.session_id else ""


class PrefillBacklog(msgspec.Struct, frozen=True, gc=False):
    """What an instance has to compute before a new prompt's turn comes.

    `queue` are its open prefills in the order of their coming, LISTED_PREFILLS at most: (tokens left, tokens of the prompt that
    are there). The first moved on for the last time at `advanced_at` (s on the view's clock). `remainders` are what is still to
    be placed, here as far as anybody knows, of prompts of which a part is computed: (request id, tokens left, tokens that will
    be there before them); of more than LISTED_PREFILLS those that came last, and that of the request that is decided on.
    `unlisted` and `unlisted_remainders` are the sums of the others. `requests` have no first token yet, paused ones included.
    `chunk_limit`: the engine computes no more tokens of one prompt in a step (long_prefill_token_threshold), so that others go on
    beside it; 0: no such limit is known.
    """

    queue: tuple[tuple[int, int], ...] = ()
    advanced_at: float = 0.0
    remainders: tuple[tuple[str, int, int], ...] = ()
    requests: int = 0
    chunk_limit: int = 0
    block_size: int = 16
    hardware: str = ""
    unlisted: PrefillSums = NO_PREFILLS
    unlisted_remainders: PrefillSums = NO_PREFILLS


NO_BACKLOG = PrefillBacklog()


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """One instance as one decision saw it: its load, and how much of this prompt it has cached, in tokens.

    `excluded` says why it must not be chosen; empty when it may. `reported_at` (s on the view's clock) is when the
    reported figures (running, waiting, kv_usage) were sampled, None before the first report; `stale`: too old to be used.
    `provisional_tokens` of the cached ones rest on an answer just given, which no event has confirmed yet.
    `recent_migrations` counts the OFFLOAD decisions whose answer was given to it within StateSettings.migration_window_s: a
    request that still prefills elsewhere is in no other counter of it. `kv_capacity_tokens` is 0 when unknown. KV can go from one
    candidate to another where `kv_gives` of the one is `kv_takes` of the other; empty: it cannot. `produces_only`: its engine
    computes KV for others, and answers nobody.
    """

    instance_id: str
    incarnation: str
    state: InstanceState
    cached_tokens: int
    new_tokens: int
    num_requests: int
    pending_prefill_tokens: int
    ongoing_decode_tokens: int
    ongoing_tokens: int
    running: int
    waiting: int
    kv_usage: float
    reported_at: float | None
    excluded: str = ""
    recent_migrations: int = 0
    kv_capacity_tokens: int = 0
    stale: bool = False
    provisional_tokens: int = 0
    prefix_source: PrefixSource = PrefixSource.NONE
    kv_gives: str = "MOONCAKE"
    kv_takes: str = "MOONCAKE"
    prefill_backlog: PrefillBacklog = NO_BACKLOG
    produces_only: bool = False

    @property
    def exact(self) -> bool:
        """Whether its cached tokens are what its own events tell."""
        return self.prefix_source is PrefixSource.EVENTS

    def can_give_kv_to(self, other: Candidate) -> bool:
        """Whether `other` can answer from KV that is computed here."""
        return self.kv_gives == other.kv_takes != "" and self.instance_id != other.instance_id


class Unseen(msgspec.Struct, frozen=True, gc=False):
    """The sums over the instances of a large pool that are no candidates of a decision: how many they are, their open requests,
    how many of them compute a prompt, and the input tokens of their open requests."""

    instances: int = 0
    num_requests: int = 0
    prefilling: int = 0
    ongoing_tokens: int = 0


NOTHING_UNSEEN = Unseen()


class FleetView(msgspec.Struct, frozen=True, gc=False):
    """All that a policy may know. `decision_number` counts the pool's decisions, for round-robin tie-breaks; `now` in s.

    `candidates` are all instances of the pool; for a policy that `looks_at_few`, of a large pool those that one of its kind may
    choose (first_choice.py), and `unseen` the sums over the others.

    `curves` tells what prefills cost on each kind of hardware among the candidates, `mean_work` the work of the mean request.
    """

    candidates: tuple[Candidate, ...]
    session_owner: str = ""
    decision_number: int = 0
    now: float = 0.0
    curves: Mapping[str, PrefillCurve] = msgspec.field(default_factory=dict)
    mean_work: PrefillWork = PrefillWork()
    unseen: Unseen = NOTHING_UNSEEN

    def find(self, instance_id: str) -> Candidate | None:
        """The candidate of that name."""
        for candidate in self.candidates:
            if candidate.instance_id == instance_id:
                return candidate
        return None

    def eligible(self) -> tuple[Candidate, ...]:
        """The candidates that may be chosen to answer."""
        # Not of a generator, which takes twice the time: this is asked several times for each decision.
        return tuple([one for one in self.candidates if not one.excluded and not one.produces_only])

    def available(self) -> tuple[Candidate, ...]:
        """The candidates that may be chosen to answer or to prefill."""
        return tuple([one for one in self.candidates if not one.excluded])

    def sources_of(self, decode: Candidate) -> tuple[Candidate, ...]:
        """The candidates that may be chosen to prefill for `decode`."""
        return tuple([one for one in self.candidates if not one.excluded and one.can_give_kv_to(decode)])

    def targets_of(self, prefill: Candidate) -> tuple[Candidate, ...]:
        """The candidates that may be chosen to answer from what `prefill` computes."""
        return tuple([one for one in self.candidates if not one.excluded and prefill.can_give_kv_to(one)])

    def report_age_s(self, candidate: Candidate) -> float | None:
        """How old the figures reported by one of the candidates were; None when there were none."""
        return None if candidate.reported_at is None else self.now - candidate.reported_at


class Step(msgspec.Struct, frozen=True, gc=False):
    """One part of a plan: what `instance_id` does, why, and for how many tokens of the prompt (PREFILL only)."""

    kind: StepKind
    instance_id: str
    reason: str
    prefix_tokens: int = 0
    kv_source: str = ""


class PolicyResult(msgspec.Struct, frozen=True, gc=False):
    """A policy's answer: the plan, the reason in a word, and the scores it compared (lower is better; finite).

    A policy that may offload gives as `reason` why it did or did not (prefill_idle_decode_busy, decode_idle, ...); its steps then
    say by which rule the instance was found (session_affinity, least_load_x_work, offload, migrate). `figures` are what else it
    compared, by name with the unit at the end (`gain_s`). `owner` becomes the session's owner; empty: the last step's instance.

    Without steps it means: hold the request, for `max_hold_s` at most after it first came (0: as long as the router allows). Of
    the requests that are held, the one with the least `queue_penalty_s` less its age is tried first. It is tried again when
    something frees at the instance `waits_for` (empty: at any).

    Steps that end with a PREFILL are the beginning of a plan: when they are done the policy is asked again.
    """

    steps: tuple[Step, ...]
    reason: str
    scores: Mapping[str, float] = msgspec.field(default_factory=dict)
    figures: Mapping[str, float] = msgspec.field(default_factory=dict)
    owner: str = ""
    max_hold_s: float = 0.0
    queue_penalty_s: float | None = None
    waits_for: str = ""


class PolicyRef(msgspec.Struct, frozen=True, gc=False):
    """A policy's name with all its settings, as a decision records it."""

    name: str
    settings: Mapping[str, float | int | str | bool]


class Decision(msgspec.Struct, frozen=True, gc=False):
    """A placement with everything it was decided on; deciding again on `request` and `view` gives the same result.

    `notes` are words on what else shaped it: `owner_draining`, `hold_expired`, ... `previous_id` is the decision on the part of
    the request's prompt that was computed before this one.
    """

    decision_id: str
    request: PlacementRequest
    pool: str
    view: FleetView
    policy: PolicyRef
    result: PolicyResult
    route_class: str
    mode: str
    cached_tokens: int
    runner_up: str
    margin: float | None
    key_count: int
    degraded: bool = False
    notes: tuple[str, ...] = ()
    previous_id: str = ""

    @property
    def instance_id(self) -> str:
        """Where the answer comes from: the instance of the last step; empty for a decision to hold."""
        return self.result.steps[-1].instance_id if self.result.steps else ""

    @property
    def held_s(self) -> float:
        """How long the request had waited when this was decided."""
        return self.request.age_s

    @property
    def next_owner(self) -> str:
        """The instance that owns the session from now on."""
        return self.result.owner or self.instance_id


def route_class(new_tokens: int, input_tokens: int) -> str:
    """HEAVY, LIGHT or MEDIUM, tested in that order: HEAVY from 20,000 new tokens; LIGHT above a cache ratio of 50 % or
    below 5,000 new tokens. Source: the reference system's classes, on the cached tokens of the instance that prefills."""
    if new_tokens >= HEAVY_NEW_TOKENS:
        return "HEAVY"
    cached = input_tokens - new_tokens
    if new_tokens < LIGHT_NEW_TOKENS or cached > LIGHT_CACHE_RATIO * input_tokens:
        return "LIGHT"
    return "MEDIUM"

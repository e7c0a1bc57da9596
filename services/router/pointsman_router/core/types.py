"""The router's domain values: instances, requests, views, plans and decisions. Immutable, without behaviour. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

import msgspec

from pointsman_router.core.admission_rule import AdmissionRecord
from pointsman_router.core.kv_load import NO_LOAD, KvLoad
from pointsman_router.core.prefill_curve import NO_PREFILLS, PrefillCurve, PrefillSums, PrefillWork
from pointsman_router.core.priority import Priority

LIGHT_CACHE_RATIO = 0.5
LIGHT_NEW_TOKENS = 5_000
HEAVY_NEW_TOKENS = 20_000
# Maximum number of open prefills, and of remainders of prompts, that a PrefillBacklog lists one by one. Any others are in sums,
# so that a decision's cost and the size of its record stay bounded. Under a policy that holds requests, few are open anyway.
LISTED_PREFILLS = 16


class InstanceState(StrEnum):
    """Whether an instance can be placed on, and whether its keys count (see FleetService.InstanceState)."""

    SYNCING = "SYNCING"
    READY = "READY"
    UNHEALTHY = "UNHEALTHY"
    SUSPENDED = "SUSPENDED"
    LOST = "LOST"
    DRAINING = "DRAINING"
    CORDONED = "CORDONED"


class PrefixSource(StrEnum):
    """The source of an instance's cached tokens: its own KV EVENTS, the router's own placements (APPROXIMATE), or NONE (its cache
    counts as empty)."""

    EVENTS = "EVENTS"
    APPROXIMATE = "APPROXIMATE"
    NONE = "NONE"


class StepKind(StrEnum):
    """What an instance does in a step."""

    PREFILL = "PREFILL"
    SERVE = "SERVE"


class Phase(StrEnum):
    """The phase of a running request: before (PREFILL) or after its first token (DECODE)."""

    PREFILL = "PREFILL"
    DECODE = "DECODE"


class KvRole(StrEnum):
    """Which sides of a KV transfer an engine can be."""

    BOTH = "BOTH"
    PRODUCER = "PRODUCER"
    CONSUMER = "CONSUMER"


class RefusedSenders(msgspec.Struct, frozen=True, gc=False):
    """The engines that must not send KV to an instance. `engines`: their ids, or their bootstrap servers' URLs where the ids are
    unknown. `urls`: the bootstrap servers of all of them. Both in order, because decisions on equal inputs have equal digests."""

    engines: tuple[str, ...] = ()
    urls: tuple[str, ...] = ()

    def refuses(self, engine_id: str, url: str) -> bool:
        """Return whether the engine is refused. If its id is unknown (empty), any engine at its bootstrap server's URL counts."""
        return engine_id in self.engines or url in self.engines if engine_id else url in self.urls


NONE_REFUSED = RefusedSenders()


class WrongKv(msgspec.Struct, frozen=True, gc=False):
    """Wrong KV that an instance received from an engine and did not use: the bootstrap server and the id of that engine (empty if
    unknown), and the number of requests. The instance refuses that engine as long as it runs."""

    bootstrap_url: str
    engine_id: str = ""
    requests: int = 0


class KvTransfer(msgspec.Struct, frozen=True, gc=False):
    """How an engine transfers KV: the protocol of its connector (MOONCAKE, NIXL), the base URL of its bootstrap server, and the
    sides of a transfer it can be. KV goes between engines of equal `cache_dtype` only. `layerwise`: the engine needs both
    requests of a transfer at once. `wrong_from`: the engines, running or not, whose KV did not have the sender's checksums when
    it arrived here. `engine_id`: the id by which receivers name this engine; empty if unknown."""

    protocol: str
    bootstrap_url: str = ""
    role: KvRole = KvRole.BOTH
    cache_dtype: str = ""
    layerwise: bool = False
    wrong_from: tuple[WrongKv, ...] = ()
    engine_id: str = ""

    @property
    def refused(self) -> RefusedSenders:
        """The engines whose KV was wrong here."""
        if not self.wrong_from:
            return NONE_REFUSED
        return RefusedSenders(
            tuple(sorted({sender.engine_id or sender.bootstrap_url for sender in self.wrong_from} - {""})),
            tuple(sorted({sender.bootstrap_url for sender in self.wrong_from} - {""})),
        )


class InstanceInfo(msgspec.Struct, frozen=True, gc=False):
    """One engine (one data-parallel rank of it) during one incarnation, as its agent described it.

    `block_size`, `kv_capacity_tokens` and `max_model_len` are in tokens; the latter two are 0 if unknown. `hardware`: a name that
    all equally fast instances share. `long_prefill_token_threshold`: vLLM's setting of that name, in tokens; 0: none or unknown.
    `sparse_prefixes`: a prefix can be cached although a shorter one is not. `events_unusable`: the engine's KV events do not show
    its keys. `shared_storage`: name of the store in which the engine keeps STORAGE blocks; instances with the same name can load
    each other's; empty: no other one can. `kv_token_bytes`: KV of one token over all layers, in bytes; 0 if unknown.
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
    sparse_prefixes: bool = False
    events_unusable: bool = False
    shared_storage: str = ""
    kv_token_bytes: int = 0


class Gpu(msgspec.Struct, frozen=True, gc=False):
    """One sample of one device: utilisation 0 to 1, memory in bytes."""

    index: int
    utilisation: float
    memory_used: int
    memory_total: int


class StepTotals(msgspec.Struct, frozen=True, gc=False):
    """Sums over all steps of an engine since its start: their time without pauses, s, their tokens, and pairs (see PrefillWork).
    `prefills`: number of prompts whose last token was computed. `prefill_seconds`: time of the steps with prompt tokens."""

    steps: int = 0
    seconds: float = 0.0
    decode_tokens: int = 0
    prefill_tokens: int = 0
    prefill_pairs: int = 0
    prefills: int = 0
    prefill_seconds: float = 0.0


class Load(msgspec.Struct, frozen=True, gc=False):
    """One load sample with the engine's own figures. `sampled_at` is in s on the router's clock; counters start with the engine.
    `suspended`: why the engine accepts requests and does not compute them; empty if it computes. `prefill_tokens_left`: tokens
    that the prompts in the engine's batch still need. It and `steps` are None if the engine does not report its steps."""

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
    suspended: str = ""
    prefill_tokens_left: int | None = None
    steps: StepTotals | None = None


def session_name(tenant: str, session_id: str) -> str:
    """Return the name of a tenant's session, unique across tenants; empty without an id."""
    return f"{tenant}/{session_id}" if session_id else ""


class PlacementRequest(msgspec.Struct, frozen=True, gc=False):
    """A request to be placed. `keys`: the block keys of the prompt's full 16-token blocks (pointsman_common.core.block_keys).

    `age_s`: how long the request has waited for its first step (between two steps: time since it came), s. `deadline_s`: how much
    longer its gateway waits, s. `sliceable_tokens`: length of the longest prefix of its prompt that its gateway can have computed
    alone. `single_instance`: the instance that answers must also prefill. `priority`: the class of its client's key. `weight`:
    its tenant's share of the class. `ttft_deadline_s`: how soon its client needs the first token, s.

    For session admission. `continues`: its last message answers the model (a tool result), so the session is under way. `parent`:
    the session that started this one and waits for it; empty: none. `parkable`: its gateway waits longer when the request is
    parked. `parked_s`: how long earlier owners of the pool parked it, s. `admitted`: its admission, if one was decided.

    `resumed`: it continues a stream whose instance is gone. `movable`: its gateway can move it to another instance, also
    after its answer has begun.
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
    continues: bool = False
    parent: str = ""
    parkable: bool = False
    parked_s: float = 0.0
    resumed: bool = False
    movable: bool = False
    admitted: AdmissionRecord | None = None

    @property
    def session(self) -> str:
        """The session's name, unique across tenants; empty for a request without a session."""
        return session_name(self.tenant, self.session_id)


class PrefillBacklog(msgspec.Struct, frozen=True, gc=False):
    """The prefill work of an instance that a new prompt has to wait for.

    `queue`: the open prefills in order of arrival, LISTED_PREFILLS at most, each (tokens left, tokens of the prompt that are
    there). `advanced_at`: when progress of the first one was last seen, s on the view's clock. `remainders`: the parts still to
    be placed of prompts of which slices are computed here, each (request id, tokens left, tokens that will be there before
    these). They are expected to be placed here, too. Of more than LISTED_PREFILLS the newest are listed, and always that of the
    request that is decided on. `unlisted` and `unlisted_remainders`: the sums of all others. `requests`: number of requests
    without a first token, paused ones included. `chunk_limit`: maximum number of tokens of one prompt that the engine computes in
    a step (long_prefill_token_threshold), so that other prompts progress beside it; 0: none or unknown.
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

    `excluded`: why the instance must not be chosen; empty if it may. `reported_at`: when the reported figures (running, waiting,
    kv_usage) were sampled, s on the view's clock; None before the first report. `stale`: these figures are too old to be used.
    `provisional_tokens`: the part of the cached tokens that an answer just computed, and that no event has confirmed yet.
    `recent_migrations`: number of OFFLOAD decisions within StateSettings.migration_window_s by which this instance answers. While
    such a request prefills elsewhere, no other counter of this instance includes it. `kv_capacity_tokens` is 0 if unknown.
    `kv_gives`, `kv_takes`: the kinds of KV that the instance can send and receive (empty: none). KV can go from one candidate to
    another if the former's `kv_gives` equals the latter's `kv_takes`, and the latter does not refuse the former: its
    `kv_engine_id` or, if that is unknown, its `kv_url`, the bootstrap server. `kv_refuses`: the engines whose KV was wrong here.
    `produces_only`: the engine computes KV for other engines and answers no requests. `kv_load`: the tokens that it has below its
    GPU. Cached tokens include them, minus the price of loading them: input tokens = cached_tokens + new_tokens, and the engine
    computes new_tokens - kv_load.price_tokens.
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
    kv_url: str = ""
    kv_engine_id: str = ""
    kv_refuses: RefusedSenders = NONE_REFUSED
    prefill_backlog: PrefillBacklog = NO_BACKLOG
    produces_only: bool = False
    kv_load: KvLoad = NO_LOAD

    @property
    def present_tokens(self) -> int:
        """Tokens of the prompt that the instance has on its GPU or in a lower tier, and does not compute."""
        return self.cached_tokens + self.kv_load.price_tokens

    def prefill_s(self, curve: PrefillCurve) -> float:
        """Return the seconds in which the instance has the whole prompt: those of the load, and of computing the rest."""
        load = self.kv_load
        price = load.price_tokens
        return curve.cost_s(self.new_tokens - price, self.cached_tokens + price) + load.seconds

    @property
    def exact(self) -> bool:
        """Whether the cached tokens come from the instance's own KV events."""
        return self.prefix_source is PrefixSource.EVENTS

    def can_give_kv_to(self, other: Candidate) -> bool:
        """Return whether `other`, a different instance, can answer from KV that is computed here."""
        return (
            self.kv_gives == other.kv_takes != ""
            and self.instance_id != other.instance_id
            and not other.kv_refuses.refuses(self.kv_engine_id, self.kv_url)
        )


class Unseen(msgspec.Struct, frozen=True, gc=False):
    """Sums over the instances of a large pool that are no candidates of a decision: their number, their open requests, how many
    of them compute a prompt, and the input tokens of their open requests."""

    instances: int = 0
    num_requests: int = 0
    prefilling: int = 0
    ongoing_tokens: int = 0


NOTHING_UNSEEN = Unseen()


class PoolFacts(msgspec.Struct, frozen=True, gc=False):
    """What is known about a pool as a whole, at most a second old (pool_facts.py).

    `instances`: number of READY instances that answer requests. `exact`: how many of them report KV events that are in use.
    `learned`: for how many of them the prefill curve of their hardware is learned. `mean_cost`: cost of FleetView.mean_work, the
    mean request, by the curves, as a multiple of that of a prompt of LIGHT_NEW_TOKENS without cached tokens; mean over the
    instances; 0 before the first request.
    """

    instances: int = 0
    exact: int = 0
    learned: int = 0
    mean_cost: float = 0.0


NO_FACTS = PoolFacts()


class FleetView(msgspec.Struct, frozen=True, gc=False):
    """Everything that a policy may use, besides the request. `decision_number` counts the pool's decisions, for round-robin
    tie-breaks; `now` is in s.

    `candidates` are all instances of the pool. A policy with `uses_shortlist` gets a shortlist (shortlist.py) of a large
    pool, and in `unseen` the sums over the other instances.

    `curves`: the prefill curve of each kind of hardware among the candidates. `mean_work`: mean prefill work of a request.
    `facts`: what is known of the pool as a whole.
    """

    candidates: tuple[Candidate, ...]
    session_owner: str = ""
    decision_number: int = 0
    now: float = 0.0
    curves: Mapping[str, PrefillCurve] = msgspec.field(default_factory=dict)
    mean_work: PrefillWork = PrefillWork()
    unseen: Unseen = NOTHING_UNSEEN
    facts: PoolFacts = NO_FACTS

    def find(self, instance_id: str) -> Candidate | None:
        """Return the candidate with this id, or None."""
        for candidate in self.candidates:
            if candidate.instance_id == instance_id:
                return candidate
        return None

    def eligible(self) -> tuple[Candidate, ...]:
        """Return the candidates that may be chosen to answer."""
        # A list, since a generator takes twice the time: a decision calls this several times.
        return tuple(
            [candidate for candidate in self.candidates if not candidate.excluded and not candidate.produces_only]
        )

    def available(self) -> tuple[Candidate, ...]:
        """Return the candidates that may be chosen to answer or to prefill."""
        return tuple([candidate for candidate in self.candidates if not candidate.excluded])

    def sources_of(self, decode: Candidate) -> tuple[Candidate, ...]:
        """Return the candidates that may be chosen to prefill for `decode`."""
        return tuple(
            [candidate for candidate in self.candidates if not candidate.excluded and candidate.can_give_kv_to(decode)]
        )

    def targets_of(self, prefill: Candidate) -> tuple[Candidate, ...]:
        """Return the candidates that may be chosen to answer from KV that `prefill` computes."""
        return tuple(
            [candidate for candidate in self.candidates if not candidate.excluded and prefill.can_give_kv_to(candidate)]
        )

    def report_age_s(self, candidate: Candidate) -> float | None:
        """Return the age of a candidate's reported figures, s; None before the first report."""
        return None if candidate.reported_at is None else self.now - candidate.reported_at


class Step(msgspec.Struct, frozen=True, gc=False):
    """One part of a plan: what `instance_id` does, and why. `prefix_tokens`: length of the prefix that is computed (PREFILL
    only). `kv_source`: the instance whose KV is used; empty: none."""

    kind: StepKind
    instance_id: str
    reason: str
    prefix_tokens: int = 0
    kv_source: str = ""


class PolicyResult(msgspec.Struct, frozen=True, gc=False):
    """A policy's answer: the plan, the reason in one word, and the scores that were compared (lower is better; finite).

    If a policy may offload, `reason` says why it did or did not (prefill_idle_decode_busy, decode_idle, ...), and the reason of
    each step is the rule that found the instance (session_affinity, least_load_x_work, offload, migrate). `figures`: other values
    that were compared, by name with the unit at the end (`gain_s`). `owner`: the session's new owner; empty: the last step's
    instance.

    A result without steps holds the request, for at most `max_hold_s` after it first came (0: as long as the router allows). Of
    the held requests, the one with the lowest `queue_penalty_s` minus its age is tried first. The request is tried again when
    something frees at the instance `waits_for` (empty: at any instance).

    Steps that end with a PREFILL are the beginning of a plan: after the last of them the policy is asked again.

    A policy that leaves the choice to another one names it in `policy`, and says why in `policy_reason`, in one word.
    """

    steps: tuple[Step, ...]
    reason: str
    scores: Mapping[str, float] = msgspec.field(default_factory=dict)
    figures: Mapping[str, float] = msgspec.field(default_factory=dict)
    owner: str = ""
    max_hold_s: float = 0.0
    queue_penalty_s: float | None = None
    waits_for: str = ""
    policy: str = ""
    policy_reason: str = ""


class PolicyRef(msgspec.Struct, frozen=True, gc=False):
    """A policy's name and all its settings, as a decision records them."""

    name: str
    settings: Mapping[str, float | int | str | bool]


class Decision(msgspec.Struct, frozen=True, gc=False):
    """A placement with everything it was decided on; deciding again on `request` and `view` has the same result.

    `notes`: other influences on the placement, as words (`owner_draining`, `hold_expired`, ...). `previous_id`: the id of the
    decision on the previous part of the request's prompt; empty for the first. `kv_load`: that of the instance with
    `cached_tokens`.
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
    kv_load: KvLoad = NO_LOAD

    @property
    def present_tokens(self) -> int:
        """Tokens of the prompt that the instance should report as cached: on its GPU, or loaded from lower tiers."""
        return self.cached_tokens + self.kv_load.price_tokens

    @property
    def instance_id(self) -> str:
        """The instance that answers, which is that of the last step; empty for a decision to hold."""
        return self.result.steps[-1].instance_id if self.result.steps else ""

    @property
    def held_s(self) -> float:
        """How long the request had waited at the time of this decision, s."""
        return self.request.age_s

    @property
    def next_owner(self) -> str:
        """The instance that owns the session from now on."""
        return self.result.owner or self.instance_id


def route_class(new_tokens: int, input_tokens: int) -> str:
    """Return HEAVY, LIGHT or MEDIUM, tested in this order: HEAVY from 20,000 new tokens; LIGHT above a cache ratio of 50 % or
    below 5,000 new tokens. Source: the reference system's classes, by the cached tokens of the instance that prefills."""
    if new_tokens >= HEAVY_NEW_TOKENS:
        return "HEAVY"
    cached = input_tokens - new_tokens
    if new_tokens < LIGHT_NEW_TOKENS or cached > LIGHT_CACHE_RATIO * input_tokens:
        return "LIGHT"
    return "MEDIUM"

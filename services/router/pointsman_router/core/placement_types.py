"""The router's domain values: instances, requests, views, plans and decisions. Immutable, without behaviour. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import cached_property

import msgspec
from msgspec import UNSET, UnsetType

from pointsman_common.core.engine_identity import UNKNOWN_IDENTITY, EngineIdentity, Use, compatible
from pointsman_common.core.session_names import session_name
from pointsman_common.core.vllm_versions import counts_output, fits_context, series
from pointsman_router.core.admission_rule import AdmissionRecord
from pointsman_router.core.kv_load import NO_LOAD, KvLoad, LoadPrice
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
    """How an engine transfers KV."""

    protocol: str  # of its connector: MOONCAKE, NIXL
    bootstrap_url: str = ""  # base URL of its bootstrap server; empty: none
    role: KvRole = KvRole.BOTH  # the sides of a transfer that it can be
    cache_dtype: str = ""  # type of the cache's elements as its flag gives it
    layerwise: bool = False  # whether the engine needs both requests of a transfer at once
    # The engines, running or not, whose KV did not have the sender's checksums when it arrived here.
    wrong_from: tuple[WrongKv, ...] = ()
    engine_id: str = ""  # the id by which receivers name this engine; empty if unknown

    @property
    def refused(self) -> RefusedSenders:
        """The engines whose KV was wrong here."""
        if not self.wrong_from:
            return NONE_REFUSED
        return RefusedSenders(
            tuple(sorted({sender.engine_id or sender.bootstrap_url for sender in self.wrong_from} - {""})),
            tuple(sorted({sender.bootstrap_url for sender in self.wrong_from} - {""})),
        )


class EngineTraits(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """What decisions see of an engine that stays the same while it runs: its identity, its context in tokens, the maximum number
    of requests in its batch (0 if unknown), and whether it refuses an output limit that the prompt leaves no room for."""

    identity: EngineIdentity = UNKNOWN_IDENTITY
    max_model_len: int = 0
    max_num_seqs: int = 0
    counts_output: bool = False

    def holds(self, prompt_tokens: int, output_tokens: int) -> bool:
        """Return whether the engine takes a prompt of so many tokens with a limit of output tokens (0: none)."""
        return fits_context(prompt_tokens, output_tokens, self.max_model_len, self.counts_output)


NO_TRAITS = EngineTraits()


class InstanceInfo(msgspec.Struct, frozen=True, dict=True):
    """One engine (one data-parallel rank of it) during one incarnation, as its agent described it. What follows from
    the description is computed once, since each placement makes candidates anew."""

    instance_id: str  # from its agent, unique and the same after restarts: HOST:PORT, or HOST:PORT/RANK
    incarnation: str  # changes with each start of the engine
    url: str  # base URL at which it answers requests
    model: str  # name of the pool: the engine's first served model name
    served_names: tuple[str, ...] = ()  # all model names that the engine answers to, without adapters
    lora_names: tuple[str, ...] = ()  # the LoRA adapters that the engine has loaded
    model_root: str = ""  # path or hub id of its tokenizer; HUB_ID@REVISION if it reports its revision
    block_size: int = 16  # in tokens
    kv_capacity_tokens: int = 0  # 0 if unknown
    max_model_len: int = 0  # in tokens; 0 if unknown
    # Its index among the ranks that the server at `url` serves; None: the server has one.
    data_parallel_rank: int | None = None
    exact_prefix: bool = True  # whether its keys come from its own KV events
    prefix_reason: str = ""  # why they do not, for people
    engine_version: str = ""  # as its GET /version returns it
    node: str = ""  # host name of the agent's node
    kv_transfer: KvTransfer | None = None  # None: it transfers no KV
    hardware: str = ""  # a name that all equally fast instances share
    long_prefill_token_threshold: int = 0  # vLLM's setting of that name, in tokens; 0: none or unknown
    sparse_prefixes: bool = False  # whether a prefix can be cached although a shorter one is not
    events_unusable: bool = False  # whether the engine's KV events do not show its keys
    # Name of the store in which the engine keeps STORAGE blocks; instances with the same name can load each other's; empty: no
    # other one can.
    shared_storage: str = ""
    kv_token_bytes: int = 0  # KV of one token over all layers, in bytes; 0 if unknown
    identity: EngineIdentity = UNKNOWN_IDENTITY  # what makes it interchangeable with others
    max_num_seqs: int = 0  # maximum number of requests in its batch; 0 if unknown
    uncertain_blocks: int = 0  # number of blocks at the end of a known prefix that a prompt can miss

    @cached_property
    def known_identity(self) -> EngineIdentity:
        """Its identity, with the type of its KV cache from the flag where an older agent reports no more."""
        identity, kv = self.identity, self.kv_transfer
        if kv is not None and kv.cache_dtype and not identity.kv_dtype:
            return msgspec.structs.replace(identity, kv_dtype=kv.cache_dtype)
        return identity

    @cached_property
    def context(self) -> EngineTraits:
        """What limits a prompt and its output here."""
        return EngineTraits(max_model_len=self.max_model_len, counts_output=counts_output(self.engine_version))

    @property
    def produces_only(self) -> bool:
        """Whether the engine computes KV for other engines and answers no requests."""
        return self.kv_transfer is not None and self.kv_transfer.role is KvRole.PRODUCER

    @cached_property
    def kv_kind(self) -> str:
        """The kind of KV that it passes on or takes, equal for those that can read each other's; empty without a KV connector.
        NIXL's connector refuses engines of any other version, Mooncake's cannot read the messages of some other ones."""
        if (kv := self.kv_transfer) is None:
            return ""
        version = self.engine_version if kv.protocol == "NIXL" else series(self.engine_version)
        return f"{kv.protocol}/{self.block_size}/{version}"

    @cached_property
    def traits(self) -> EngineTraits | UnsetType:
        """What decisions see of the engine's identity and limits; unset if nothing is known."""
        counts = counts_output(self.engine_version)
        traits = EngineTraits(self.known_identity, self.max_model_len, self.max_num_seqs, counts)
        return traits if traits != NO_TRAITS else UNSET


class Gpu(msgspec.Struct, frozen=True, gc=False):
    """One sample of one device: utilisation 0 to 1, memory in bytes."""

    index: int
    utilisation: float
    memory_used: int
    memory_total: int


class StepTotals(msgspec.Struct, frozen=True, gc=False):
    """Sums over all steps of an engine since its start."""

    steps: int = 0  # number of steps with tokens
    seconds: float = 0.0  # their time, without the pauses between them
    decode_tokens: int = 0  # tokens of requests whose prompts are complete
    prefill_tokens: int = 0  # prompt tokens that were computed
    prefill_pairs: int = 0  # pairs of these tokens (see PrefillWork)
    prefills: int = 0  # number of prompts whose last token was computed
    prefill_seconds: float = 0.0  # time of the steps with prompt tokens


FIGURES = (
    "running",
    "waiting",
    "kv_usage",
    "generation_tokens",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "external_prefix_cache_queries",
    "external_prefix_cache_hits",
    "preemptions",
)
"""The fields of `Load` that an engine may not report."""


class Load(msgspec.Struct, frozen=True, gc=False):
    """One load sample with the engine's own figures; None: the engine does not report it. Counters start with the engine."""

    sampled_at: float  # s on the router's clock
    running: int | None = 0  # requests in the engine's batch
    waiting: int | None = 0  # requests in the engine's queue
    kv_usage: float | None = 0.0  # share of its KV blocks that are in use, 0 to 1
    generation_tokens: int | None = 0  # counter of generated tokens
    prefix_cache_queries: int | None = 0  # counter of prompt tokens looked up in the local prefix cache
    prefix_cache_hits: int | None = 0  # counter of those found there
    external_prefix_cache_queries: int | None = 0  # counter of prompt tokens looked up through a KV connector
    external_prefix_cache_hits: int | None = 0  # counter of those found there
    preemptions: int | None = 0  # counter
    healthy: bool = True  # whether the engine answers its agent
    gpus: tuple[Gpu, ...] = ()  # the engine's, as its agent sampled them; empty: none
    suspended: str = ""  # why the engine accepts requests and does not compute them; empty if it computes
    # Tokens that the prompts in the engine's batch still need; None if it does not report its steps.
    prefill_tokens_left: int | None = None
    steps: StepTotals | None = None  # None if the engine does not report its steps
    problem: str = ""  # what is wrong with the engine, or with the reading of its load; empty if nothing is
    events_problem: str = ""  # why its newest KV events did not arrive or could not be read; empty if they did

    @property
    def unknown(self) -> tuple[str, ...]:
        """The names of the figures that the engine does not report."""
        return tuple(name for name in FIGURES if getattr(self, name) is None)


class PlacementRequest(msgspec.Struct, frozen=True, gc=False):
    """A request to be placed."""

    request_id: str  # from its gateway, unique; cannot be used again once the request has ended, unless cancelled
    model: str  # as the client sent it: the pool's name, another of its served names, or an adapter's
    # Tokens that an engine with an empty cache computes; an estimate without the tokenizer. They are those of the prompt, and of
    # several prompts what they all begin with counts once.
    input_tokens: int
    keys: Sequence[int] = ()  # block keys of the prompt's full 16-token blocks (pointsman_common.core.block_keys)
    tenant: str = ""  # sessions of different tenants are different
    session_id: str = ""  # unique within the tenant; empty if unknown
    max_output_tokens: int = 0  # the client's limit; 0: none
    exclude: tuple[str, ...] = ()  # instances at which an earlier attempt failed
    deadline_s: float | None = None  # how much longer its gateway waits, s
    age_s: float = 0.0  # how long it has waited for its first step (between two steps: time since it came), s
    sliceable_tokens: int = 0  # length of the longest prefix of its prompt that its gateway can have computed alone
    single_instance: bool = False  # whether the instance that answers must also prefill
    priority: Priority = Priority.STANDARD  # the class of its client's key
    weight: float = 1.0  # its tenant's share of the class
    ttft_deadline_s: float | None = None  # how soon its client needs the first token, s
    continues: bool = False  # its last message answers the model (a tool result), so the session is under way
    parent: str = ""  # the session that started this one and waits for it; empty: none
    parkable: bool = False  # its gateway waits longer when the request is parked
    parked_s: float = 0.0  # how long earlier owners of the pool parked it, s
    resumed: bool = False  # it continues a stream whose instance is gone
    movable: bool = False  # its gateway can move it to another instance, also after its answer has begun
    begun_by: EngineIdentity = UNKNOWN_IDENTITY  # if `resumed`: what is known of the engines that answered so far
    longest_prompt_tokens: int = 0  # of its prompts the longest, which a context has to hold; 0: input_tokens
    sequences: int = 1  # sequences that its engine runs: its prompts, times the answers (`n`) to each
    sequence_tokens: int = 0  # prompt tokens of all sequences, those of each in full; 0: input_tokens
    admitted: AdmissionRecord | None = None  # its admission, if one was decided
    streamed: bool = False  # its gateway tells the first token of its answer
    agent_id: str = ""  # of an agent that another one started; empty: unknown, or none
    agent_parent: str = ""  # the session, of the same tenant, whose agent started this one; empty: unknown
    # Tokens that its program had been served lately when it came (attained_service.py); 0 if the order does not ask for it.
    program_tokens: float = 0.0

    @property
    def context_tokens(self) -> int:
        """Tokens of a prompt that an engine's context has to hold."""
        return self.longest_prompt_tokens or self.input_tokens

    @property
    def sequence_length(self) -> int:
        """Mean length of its prompts, in tokens."""
        return (self.sequence_tokens or self.input_tokens) // self.sequences

    @property
    def session(self) -> str:
        """The session's name, unique across tenants; empty for a request without a session."""
        return session_name(self.tenant, self.session_id)

    @property
    def started_by(self) -> str:
        """The name of the session that started this one, as its client or the headers of its agent tell; empty: none, or
        unknown."""
        return self.parent or session_name(self.tenant, self.agent_parent)


class PrefillBacklog(msgspec.Struct, frozen=True, gc=False):
    """The prefill work of an instance that a new prompt has to wait for."""

    # The open prefills in order of arrival, LISTED_PREFILLS at most, each (tokens left, tokens of the prompt that are there).
    queue: tuple[tuple[int, int], ...] = ()
    advanced_at: float = 0.0  # when progress of the first one was last seen, s on the view's clock
    # The parts still to be placed of prompts of which slices are computed here, each (request id, tokens left, tokens that will
    # be there before these). They are expected to be placed here, too. Of more than LISTED_PREFILLS the newest are listed, and
    # always that of the request that is decided on.
    remainders: tuple[tuple[str, int, int], ...] = ()
    requests: int = 0  # number of requests (each sequence counts) without a first token, paused ones included
    # Maximum number of tokens of one prompt that the engine computes in a step (long_prefill_token_threshold), so that other
    # prompts progress beside it; 0: none or unknown.
    chunk_limit: int = 0
    block_size: int = 16  # of the engine, in tokens
    hardware: str = ""  # the key of the instance's curve in FleetView.curves
    unlisted: PrefillSums = NO_PREFILLS  # the sums of the prefills that are not in `queue`
    unlisted_remainders: PrefillSums = NO_PREFILLS  # the sums of the parts that are not in `remainders`
    # When an answer last began here, s on the view's clock. Unset where nothing is known of it, so that records of earlier
    # versions have the digests that they had.
    answer_began_at: float | UnsetType = UNSET


NO_BACKLOG = PrefillBacklog()


class Transfers(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """What open fetches of cached prefixes move to and from an instance, as far as it concerns one prompt."""

    sending_tokens: int = 0  # those that it sends to others
    arriving_tokens: int = 0  # leading tokens of the prompt that it has once the KV that is on its way has arrived
    arrives_s: float = 0.0  # predicted time until then, s


NO_TRANSFERS = Transfers()


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """One instance as one decision saw it: its load, and how much of this prompt it has cached, in tokens.

    Input tokens = cached_tokens + new_tokens, and the engine computes new_tokens - kv_load.price_tokens. KV can go from one
    candidate to another if the former's `kv_gives` equals the latter's `kv_takes`, nothing known of their identities differs, and
    the latter does not refuse the former.
    """

    instance_id: str  # as in InstanceInfo
    incarnation: str  # at the time of the decision
    state: InstanceState  # at the time of the decision; what follows from it is in `excluded`
    cached_tokens: int  # those below its GPU included, minus the price of loading them
    new_tokens: int  # all others of the prompt
    num_requests: int  # its open requests; as in the engine, each sequence of a request counts
    pending_prefill_tokens: int  # of their prompts, not computed yet
    ongoing_decode_tokens: int  # prompt tokens of the sequences in decode
    ongoing_tokens: int  # input tokens of all requests
    # As reported; None: the engine does not report it. 0 before the first report.
    running: int | None  # requests in the engine's batch
    waiting: int | None  # requests in the engine's queue
    kv_usage: float | None  # share of its KV blocks in use, 0 to 1
    # When the reported figures were sampled, s on the view's clock; None before the first report.
    reported_at: float | None
    excluded: str = ""  # why the instance must not be chosen; empty if it may
    # Number of OFFLOAD decisions within StateSettings.migration_window_s by which this instance answers. While such a request
    # prefills elsewhere, no other counter of this instance includes it.
    recent_migrations: int = 0
    kv_capacity_tokens: int = 0  # 0 if unknown
    stale: bool = False  # whether the reported figures are too old to be used
    # The part of the cached tokens that an answer just computed, and that no event has confirmed yet.
    provisional_tokens: int = 0
    prefix_source: PrefixSource = PrefixSource.NONE  # the source of its cached tokens
    kv_gives: str = "MOONCAKE"  # the kind of KV that it can send; empty: none
    kv_takes: str = "MOONCAKE"  # the kind of KV that it can receive; empty: none
    kv_url: str = ""  # its bootstrap server, by which it is refused if its id is unknown
    kv_engine_id: str = ""  # the id by which it is refused; empty if unknown
    kv_refuses: RefusedSenders = NONE_REFUSED  # the engines whose KV was wrong here
    prefill_backlog: PrefillBacklog = NO_BACKLOG  # what a new prompt waits for
    produces_only: bool = False  # whether the engine computes KV for other engines and answers no requests
    kv_load: KvLoad = NO_LOAD  # the tokens that it has below its GPU
    # Its identity and limits. Unset where nothing is known, so that records of earlier versions have the digests that they had.
    traits: EngineTraits | UnsetType = UNSET
    transfers: Transfers | UnsetType = UNSET  # unset: nothing is fetched to or from it
    held_for: int | UnsetType = UNSET  # number of other requests that are held for it; unset: none

    @property
    def identity(self) -> EngineIdentity:
        """What makes it interchangeable with others, as far as it is known."""
        return UNKNOWN_IDENTITY if self.traits is UNSET else self.traits.identity

    @property
    def present_tokens(self) -> int:
        """Tokens of the prompt that the instance has on its GPU or in a lower tier, and does not compute."""
        return self.cached_tokens + self.kv_load.price_tokens

    @property
    def device_tokens(self) -> int:
        """Tokens of the prompt that the instance has on its GPU."""
        return self.cached_tokens - self.kv_load.credit_tokens

    def prefill_s(self, curve: PrefillCurve, length: int) -> float:
        """Return the seconds in which the instance has the whole prompt: those of the load, and of computing the rest.
        `length`: as in token_pairs."""
        load = self.kv_load
        price = load.price_tokens
        return curve.cost_s(self.new_tokens - price, self.cached_tokens + price, length) + load.seconds

    @property
    def exact(self) -> bool:
        """Whether the cached tokens come from the instance's own KV events."""
        return self.prefix_source is PrefixSource.EVENTS

    def can_give_kv_to(self, other: Candidate) -> bool:
        """Return whether `other`, a different instance, can answer from KV that is computed here."""
        return (
            self.kv_gives == other.kv_takes != ""
            and self.instance_id != other.instance_id
            and compatible(self.identity, other.identity, Use.KV)
            and not other.kv_refuses.refuses(self.kv_engine_id, self.kv_url)
        )


class Unseen(msgspec.Struct, frozen=True, gc=False):
    """Sums over the instances of a large pool that are no candidates of a decision, without those that get no requests (cordoned,
    draining, suspended, failing, producers of KV): their number, their open requests, how many of them compute a prompt, and the
    input tokens of their open requests."""

    instances: int = 0
    num_requests: int = 0
    prefilling: int = 0
    ongoing_tokens: int = 0


NOTHING_UNSEEN = Unseen()


class PoolFacts(msgspec.Struct, frozen=True, gc=False):
    """What is known about a pool as a whole. In a FleetView: as it is used to choose the pool's policy, which is at most a second
    old unless the newest facts lead to another choice: that must last before it is made (pool_facts.py).

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
    """Everything that a policy may use, besides the request."""

    # All instances of the pool, or a shortlist of a large one for a policy with `uses_shortlist` (shortlist.py).
    candidates: tuple[Candidate, ...]
    session_owner: str = ""  # the instance that owns the session; empty: none
    decision_number: int = 0  # counts the pool's decisions, for round-robin tie-breaks
    now: float = 0.0  # s on the router's clock
    # The prefill curve of each kind of hardware among the candidates.
    curves: Mapping[str, PrefillCurve] = msgspec.field(default_factory=dict)
    mean_work: PrefillWork = PrefillWork()  # mean prefill work of a request
    unseen: Unseen = NOTHING_UNSEEN  # the sums over the instances that are no candidates
    facts: PoolFacts = NO_FACTS  # what is known of the pool as a whole
    # The time that fetching a cached prefix from another instance takes. Unset where no engine can, or the prompt may not.
    fetch_price: LoadPrice | UnsetType = UNSET

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

    def any_eligible(self) -> bool:
        """Return whether `eligible` has a candidate."""
        return any(not candidate.excluded and not candidate.produces_only for candidate in self.candidates)

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
    """One part of a plan."""

    kind: StepKind  # what the instance does
    instance_id: str  # the instance that computes the prefix, or answers
    reason: str  # why, in one word
    prefix_tokens: int = 0  # length of the prefix that the instance has after the step (PREFILL only)
    # The instance whose KV is used; empty: none. A PREFILL gets the prefix from there, which has it cached, and computes nothing.
    kv_source: str = ""

    @property
    def fetches(self) -> bool:
        """Whether the step gets a cached prefix from another instance."""
        return self.kind is StepKind.PREFILL and self.kv_source != ""


class PolicyResult(msgspec.Struct, frozen=True, gc=False):
    """A policy's answer. Without steps it holds the request.

    Steps that end with a PREFILL are the beginning of a plan: after the last of them the policy is asked again.
    """

    # The plan. The reason of each step is the rule that found the instance (session_affinity, least_load_x_work, offload,
    # migrate).
    steps: tuple[Step, ...]
    # In one word. If a policy may offload, why it did or did not (prefill_idle_decode_busy, decode_idle, ...).
    reason: str
    # Those that were compared: lower is better; finite.
    scores: Mapping[str, float] = msgspec.field(default_factory=dict)
    # Other values that were compared, by name with the unit at the end (`gain_s`).
    figures: Mapping[str, float] = msgspec.field(default_factory=dict)
    owner: str = ""  # the session's new owner; empty: the last step's instance
    max_hold_s: float = 0.0  # how long the request is held after it first came; 0: as long as the router allows
    # Of the held requests, the one with the lowest penalty minus its age is tried first.
    queue_penalty_s: float | None = None
    waits_for: str = ""  # the request is tried again when something frees at this instance; empty: at any
    policy: str = ""  # the policy to which this one leaves the choice
    policy_reason: str = ""  # why it does, in one word


class PolicyRef(msgspec.Struct, frozen=True, gc=False):
    """A policy's name and all its settings, as a decision records them."""

    name: str
    settings: Mapping[str, float | int | str | bool]


class Decision(msgspec.Struct, frozen=True, gc=False):
    """A placement with everything it was decided on; deciding again on `request` and `view` has the same result."""

    decision_id: str  # ROUTER_ID[.SEED]-NUMBER, from which its randomness follows; dry-run if made by `explain`
    request: PlacementRequest
    pool: str  # the one to which the request's model belonged
    view: FleetView
    policy: PolicyRef  # the policy in force; if it left the choice to another one, `result` names that
    result: PolicyResult  # without steps: the request is held
    route_class: str  # of the request on the chosen instance
    mode: str  # the form of the plan
    cached_tokens: int  # tokens of the prompt predicted to be cached on the chosen instance
    runner_up: str  # id of the second best instance; empty: none
    margin: float | None  # the runner-up's score minus that of the chosen instance; None if scores did not decide
    key_count: int  # number of block keys of the prompt
    degraded: bool = False  # whether the shared store was away
    notes: tuple[str, ...] = ()  # other influences on the placement, as words (`owner_draining`, `hold_expired`, ...)
    previous_id: str = ""  # id of the decision on the previous part of the request's prompt; empty for the first
    kv_load: KvLoad = NO_LOAD  # that of the instance with `cached_tokens`

    @property
    def present_tokens(self) -> int:
        """Tokens of the prompt that the instance should report as cached: on its GPU, or loaded from lower tiers."""
        return self.cached_tokens + self.kv_load.price_tokens

    @property
    def in_one_step(self) -> bool:
        """Whether one step has the whole request. A plan in slices begins with a PREFILL alone."""
        steps = self.result.steps
        return not self.previous_id and len(steps) == 1 and steps[0].kind is StepKind.SERVE

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

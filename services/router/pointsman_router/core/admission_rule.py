"""Decides whether a request may begin: it is admitted, parked or refused. A pure function of what the router sees. Pure."""

from __future__ import annotations

from enum import StrEnum

import msgspec

# Share of an instance's KV up to which a session is small, and is never parked.
SMALL_SHARE = 0.01


class AdmissionOutcome(StrEnum):
    """ADMIT: the request is placed now. PARK: it waits until its session fits. REFUSE: it has waited as long as it may."""

    ADMIT = "ADMIT"
    PARK = "PARK"
    REFUSE = "REFUSE"


class AdmissionView(msgspec.Struct, frozen=True, gc=False):
    """All that an admission is decided on; recorded with the decision. Sizes in tokens of KV."""

    size: int  # what the request's session would add
    weighted: float  # sum of the sizes of the sessions under way, each times its chance to need its KV soon
    capacity: float  # what the pool's caches are to hold; 0: unknown
    largest: int  # KV of its largest instance
    armed: bool  # whether the caches evict what is needed again
    under_way: str = ""  # why the request continues work under way; empty: it is new, or resumes
    # Whether it continues a session under way whose context the caches have lost, so that to wait costs nothing.
    resumes: bool = False
    before: int = 0  # number of parked requests that go first
    waited_s: float = 0.0  # how long it was parked
    bound_s: float = 0.0  # how long it may be parked


class AdmissionVerdict(msgspec.Struct, frozen=True, gc=False):
    """The outcome and its reason in one word."""

    outcome: AdmissionOutcome
    reason: str


class AdmissionRecord(msgspec.Struct, frozen=True, gc=False):
    """An admission as a placement's decision records it; deciding again on `view` has the same verdict."""

    view: AdmissionView
    verdict: AdmissionVerdict


def decide_admission(view: AdmissionView) -> AdmissionVerdict:
    """Return the verdict on a request. The first rule that applies:

    capacity_unknown  ADMIT   nobody goes first, and the KV of an instance is unknown, so nothing can be compared
    under_way's word  ADMIT   the request continues work under way, which holds KV and must not wait
    not_armed         ADMIT   nobody goes first, and the caches keep what is needed again, or sessions are not admitted any more
    small             ADMIT   size <= SMALL_SHARE x largest
    fits              ADMIT   nobody goes first, and weighted + size <= capacity (or nothing is under way)
    resumed           ADMIT   it resumes a session, and waited_s >= bound_s: what is half done is never refused
    bound             REFUSE  waited_s >= bound_s
    full              PARK    otherwise
    """
    first = not view.before
    if first and view.capacity <= 0:
        return AdmissionVerdict(AdmissionOutcome.ADMIT, "capacity_unknown")
    if view.under_way:
        return AdmissionVerdict(AdmissionOutcome.ADMIT, view.under_way)
    if first and not view.armed:
        return AdmissionVerdict(AdmissionOutcome.ADMIT, "not_armed")
    if view.size <= SMALL_SHARE * view.largest:
        return AdmissionVerdict(AdmissionOutcome.ADMIT, "small")
    if first and (view.weighted + view.size <= view.capacity or view.weighted <= 0):
        return AdmissionVerdict(AdmissionOutcome.ADMIT, "fits")
    if view.waited_s >= view.bound_s:
        if view.resumes:
            return AdmissionVerdict(AdmissionOutcome.ADMIT, "resumed")
        return AdmissionVerdict(AdmissionOutcome.REFUSE, "bound")
    return AdmissionVerdict(AdmissionOutcome.PARK, "full")

"""The admission rules of the lab, by name. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pointsman_lab.admission.concur import Concur
from pointsman_lab.admission.least_attained import LeastAttained
from pointsman_lab.admission.progress_ttl import ProgressTtl
from pointsman_lab.admission.rule import AdmissionRule
from pointsman_lab.admission.thunderagent import DYNAMO, ThunderAgent

# Name -> rule for a pool, from the tokens of KV of each of its instances.
RULES: Mapping[str, Callable[[Mapping[str, int]], AdmissionRule]] = {
    "thunderagent": ThunderAgent,
    "thunderagent_dynamo": lambda capacity: ThunderAgent(capacity, DYNAMO),
    "progress_ttl": ProgressTtl,
    "least_attained": lambda capacity: LeastAttained(),
    "concur": lambda capacity: Concur(len(capacity)),
    "concur_h50": lambda capacity: Concur(len(capacity), h_low=0.5),
}

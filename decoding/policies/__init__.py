"""Policies, which decide how much to draft now: fixed, by transformers' schedule, or by costs measured here.

A policy is state owned by the caller, one for each pair of target and drafter: it goes on learning over texts and
batches. No policy changes what a lossless rule guarantees. `FixedPolicy` and `HeuristicPolicy` never look at a clock;
the choices of `MeasuredPolicy` depend on it, so two runs may draft differently, and sampled texts may differ too.
"""

from collections.abc import Callable, Mapping

from decoding.policies.base import PLAIN, Budget, Policy, Rehearsal
from decoding.policies.measured import MeasuredPolicy
from decoding.policies.simple import FixedPolicy, HeuristicPolicy

__all__ = ["PLAIN", "Budget", "FixedPolicy", "HeuristicPolicy", "MeasuredPolicy", "Policy", "Rehearsal", "named_policy"]

_POLICIES: Mapping[str, Callable[[], Policy]] = {
    "fixed": FixedPolicy,
    "heuristic": HeuristicPolicy,
    "measured": MeasuredPolicy,
}


def named_policy(name: str) -> Policy:
    """Make a new policy by its name on the command line; ValueError for a name that is none of them."""
    if name not in _POLICIES:
        raise ValueError(f"no policy is called {name!r}: choose one of {', '.join(_POLICIES)}")
    return _POLICIES[name]()

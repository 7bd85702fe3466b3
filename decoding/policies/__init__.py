"""How much to draft now: fixed, by transformers' schedule, or by what was measured on this machine; and a guard.

A policy is state owned by the caller, one for each pair of target and drafter: it goes on learning over texts and
batches. None changes what a lossless rule
guarantees. `FixedPolicy` and `HeuristicPolicy` never look at a clock; the choices of `MeasuredPolicy` and `Guarded`
do depend on it, so two runs of them may draft differently, and a sampled text may come out differently too.
"""

from collections.abc import Callable, Mapping

from decoding.policies.base import PLAIN, Budget, Policy
from decoding.policies.measured import Guarded, MeasuredPolicy
from decoding.policies.simple import FixedPolicy, HeuristicPolicy

__all__ = ["PLAIN", "Budget", "FixedPolicy", "Guarded", "HeuristicPolicy", "MeasuredPolicy", "Policy", "named_policy"]

_POLICIES: Mapping[str, Callable[[], Policy]] = {
    "fixed": FixedPolicy,
    "heuristic": HeuristicPolicy,
    "measured": MeasuredPolicy,
}


def named_policy(name: str) -> Policy:
    """A new policy by its name on the command line."""
    if name not in _POLICIES:
        raise ValueError(f"no policy is called {name!r}: choose one of {', '.join(_POLICIES)}")
    return _POLICIES[name]()

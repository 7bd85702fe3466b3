"""Tables of docs/explanation, written from the numbers in `explained.py` into marked blocks of the pages."""

import math
from collections.abc import Callable, Iterable, Sequence

import explained
from explained import FIXED, SAMPLED, TOKENS, WITHOUT, P, Q
from explanation_pictures import number

from decoding.measure.proof.enumeration import LOSSLESS
from decoding.rules.tree import ProposalKind
from decoding.rules.verify import RULES

MAKER = "scripts/draw_explanations.py"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(line)} |" for line in (header, *rows)]
    return "\n".join([lines[0], f"|---{'|---:' * (len(header) - 1)}|", *lines[1:]])


def numbers(values: Iterable[float]) -> str:
    return f"({', '.join(map(number, values))})"


# --- speculation ------------------------------------------------------------------------------------------------------


def costs() -> str:
    """Return a table of v(n), the measured cost of a pass over n tokens."""
    curve, report = explained.measured_costs(), explained.smollm2_report()
    machine = report["hardware"]
    where = f"In {report['dtype']} on {machine['processor']}, {machine['threads']} threads; commit {report['commit']}."
    head = ["target", *(f"v({size})" for size in curve)]
    return f"{table(head, [['SmolLM2-135M-Instruct', *(f'{cost:.2f}' for cost in curve.values())]])}\n\n{where}"


RATES = (0.1, 0.2, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9)
COSTS = (0.05, 0.1, 0.2, 0.3)


def depths() -> str:
    """Return a table of the best depth and its speed-up, by per-position acceptance and draft cost, for measured costs
    of passes.
    """
    curve = explained.measured_costs()

    def cell(rate: float, cost: float) -> str:
        depth, speedup = explained.best_depth(rate, cost, curve)
        return f"{depth}: {speedup:.2f}×" if depth else "plain"

    rows = [[f"{rate:g}", *(cell(rate, cost) for cost in COSTS)] for rate in RATES]
    return table(["per-position acceptance", *(f"c = {cost:g}" for cost in COSTS)], rows)


# --- rules ------------------------------------------------------------------------------------------------------------


def overview() -> str:
    """Return a table of all rules, with the promise of each rule and the proposals that the rule supports."""
    rows = []
    for name, rule in RULES.items():
        kinds = "any" if rule.kinds == set(ProposalKind) else ", ".join(sorted(kind.value for kind in rule.kinds))
        rows.append([f"`{name}`", rule.label, "chains" if rule.chains_only else "chains and trees", kinds])
    head = "| rule | promise | shape | how the tokens were chosen |\n|---|---|---|---|"
    return "\n".join([head, *(f"| {' | '.join(line)} |" for line in rows)])


def first_refused() -> tuple[float, list[float]]:
    """Return the probability that a single drafted token is rejected, and the distribution of the token written
    instead.
    """
    residual = [max(0.0, p - q) for p, q in zip(P, Q, strict=True)]
    return sum(residual), [part / sum(residual) for part in residual]


def by_hand_token() -> str:
    """Return a table that works out token rejection for each token."""
    rows = [
        [token, *map(number, (q, min(1, p / q), q * min(1, p / q), max(0.0, p - q), p))]
        for token, p, q in zip(TOKENS, P, Q, strict=True)
    ]
    return table(["token", "q", "min(1, p/q)", "drafted and kept", "by the target: (p − q)₊", "sum: p"], rows)


def second_q(kind: object) -> Sequence[float]:
    """Return q for the second child after the first child was rejected."""
    if kind is SAMPLED:
        return Q
    (refusable,) = [place for place, (p, q) in enumerate(zip(P, Q, strict=True)) if q > p]
    return [0.0 if place == refusable else q / (1 - Q[refusable]) for place, q in enumerate(Q)]


def by_hand_recursive(kind: object) -> str:
    """Return a table that works out recursive rejection of two children."""
    refused, p_two = first_refused()
    q_two = second_q(kind)
    rows = []
    for token, p, q, p2, q2 in zip(TOKENS, P, Q, p_two, q_two, strict=True):
        kept, second, own = min(p, q), refused * min(p2, q2), refused * max(0.0, p2 - q2)
        rows.append([token, number(kept), f"{number(p2)}, {number(q2)}"])
        rows[-1] += map(number, (second, own, kept + second + own))
    header = [
        "token",
        "first child kept",
        "p₂, q₂",
        f"second kept: {number(refused)} min(p₂, q₂)",
        f"by the target: {number(refused)} (p₂ − q₂)₊",
        "sum",
    ]
    return table(header, rows)


def by_hand_top() -> str:
    """Return sentences that work out what the top-k rule does with the two best tokens of q."""
    first, second = sorted(range(len(Q)), key=lambda place: -Q[place])[:2]
    left = [0.0 if place == first else p / (1 - P[first]) for place, p in enumerate(P)]
    last = [0.0 if place in (first, second) else p / (1 - P[first] - P[second]) for place, p in enumerate(P)]
    rest = 1 - P[first]
    kept_second = rest * left[second]
    return (
        f"{TOKENS[first]} is kept with p = {number(P[first])}. If it is rejected, p becomes {numbers(left)}, and "
        f"{TOKENS[second]} is kept with {number(rest)} × {number(left[second])} = {number(kept_second)}. If this "
        f"token is also rejected, p becomes {numbers(last)}, and the target draws from it with "
        f"{number(rest - kept_second)}. A drafted token is kept with p(S) = {number(P[first] + P[second])}."
    )


def by_hand_block() -> str:
    """Return sentences that work out block verification of the chain b, a, and compare it with token rejection."""
    first, second = TOKENS.index("b"), TOKENS.index("a")
    ratios = [P[place] / Q[place] for place in (first, second)]
    reach_one = min(1, ratios[0])
    reach_two = min(1, reach_one * ratios[1])
    drafted = Q[first] * Q[second]
    residual = sum(max(0.0, reach_one * p - q) for p, q in zip(P, Q, strict=True))
    share = residual / (residual + 1 - reach_one)
    token = min(1, ratios[0]) * min(1, ratios[1])
    return (
        f"The draft draws b, a with {number(Q[first])} × {number(Q[second])} = {number(drafted)}. Token rejection "
        f"keeps b with {number(min(1, ratios[0]))} and then a with {number(min(1, ratios[1]))}: both with "
        f"{number(token)}. Block verification has P₁ = {number(reach_one)} and P₂ = min(1, {number(reach_one)} × "
        f"{number(ratios[1])}) = {number(reach_two)}. It keeps both with {number(reach_two)} and writes ba with "
        f"{number(drafted)} × {number(reach_two)} = {number(drafted * reach_two)}, all of p(b) p(a) = "
        f"{number(P[first] * P[second])}. Thus b is never kept alone: S = {number(residual)}, h = {number(share)}."
    )


def by_hand_typical() -> str:
    """Return sentences that work out typical acceptance."""
    epsilon, delta = 0.09, 0.3
    entropy = -sum(p * math.log(p) for p in P)
    bound = min(epsilon, delta * math.exp(-entropy))
    passing = [token for token, p in zip(TOKENS, P, strict=True) if p > bound]
    written = [sum(row) for row in explained.split("typical")]
    return (
        f"H(p) = {number(entropy)}, δ exp(−H) = {number(delta * math.exp(-entropy))}, so the bound is "
        f"{number(bound)}. {', '.join(passing)} all pass, so every drafted token is kept: the text is distributed "
        f"as q, {numbers(written)}, not as p, {numbers(P)}."
    )


DRAFTS = (
    ("one token", SAMPLED),
    ("a chain of two", SAMPLED),
    ("two children", SAMPLED),
    ("two children", WITHOUT),
    ("two children", FIXED),
    ("two branches of two", SAMPLED),
    ("two branches of two", WITHOUT),
    ("two branches of two", FIXED),
)
HOW = {SAMPLED: "drawn", WITHOUT: "drawn without replacement", FIXED: "best of q"}


def kept() -> str:
    """Return a table of drafts: for each draft, the expected number of tokens that each lossless rule keeps, largest
    first. Rules that do not support a draft are left out.
    """
    rows = []
    for shape, kind in DRAFTS:
        rules: dict[str, list[str]] = {}
        for name, value in _kept(shape, kind).items():
            if RULES[name].lossless:
                rules.setdefault(f"{value:.3f}", []).append(f"`{name}`")
        cells = [f"{', '.join(names)} {value}" for value, names in sorted(rules.items(), reverse=True)]
        rows.append(f"| {shape}, {HOW[kind]} | {' · '.join(cells)} |")
    return "\n".join(["| draft | expected kept tokens, largest first |", "|---|---|", *rows])


def distances() -> str:
    """Return a sentence on the largest distance from p over the drafts of `kept`, for lossless rules and for the lossy
    rule.
    """
    found = {True: 0.0, False: 0.0}
    for shape, kind in DRAFTS:
        for name in _kept(shape, kind):
            lossless = RULES[name].lossless
            found[lossless] = max(found[lossless], explained.distance(name, kind, shape))
    assert found[True] < LOSSLESS, "a rule labelled lossless is not"
    return (
        f"Over all these drafts, the largest difference between a text's probability and the target's is below "
        f"{LOSSLESS:g} for the lossless rules, and {found[False]:.2f} for `typical`."
    )


def _kept(shape: str, kind: ProposalKind) -> dict[str, float]:
    """Return the expected number of kept tokens of a draft with this shape and kind, for each sampling rule that
    supports it.
    """
    values = {name: explained.kept_tokens(name, kind, shape) for name in RULES if name != "greedy"}
    return {name: value for name, value in values.items() if value is not None}


# --- trees ------------------------------------------------------------------------------------------------------------


def shares() -> str:
    """Return a table of the shares from which the example's tree is chosen."""
    ranks = range(len(explained.SHARES[0]))
    rows = [
        [f"depth {depth}", *(number(row[rank]) for rank in ranks)]
        for depth, row in enumerate(explained.SHARES, start=1)
    ]
    return table(["", *(f"rank {rank}" for rank in ranks)], rows)


def nodes() -> str:
    """Return a table of the example's nodes: the path of ranks to the node, and the probability that it is kept."""
    _, paths, probabilities = explained.example_tree()
    rows = [
        [str(node), ", ".join(map(str, path)), number(probability)]
        for node, (path, probability) in enumerate(zip(paths, probabilities, strict=True), start=1)
    ]
    return table(["node", "path of ranks", "kept with"], rows)


def trees() -> str:
    """Return a table of the expected number of kept tokens, for the best chain and the best tree of each size."""
    sizes = (1, 2, 3, 4, 8, 16)
    found = [explained.kept_of_trees(size) for size in sizes]
    rows = [
        ["best chain", *(f"{chain:.2f}" for chain, _ in found)],
        ["best tree", *(f"{tree:.2f}" for _, tree in found)],
    ]
    return table(["drafted tokens, at most", *map(str, sizes)], rows)


BLOCKS: dict[str, dict[str, Callable[[], str]]] = {
    "speculation": {"costs": costs, "depths": depths, "shares": shares, "nodes": nodes, "trees": trees},
    "exactness": {
        "rules": overview,
        "token": by_hand_token,
        "recursive": lambda: by_hand_recursive(SAMPLED),
        "recursive-without": lambda: by_hand_recursive(WITHOUT),
        "top-k": by_hand_top,
        "block": by_hand_block,
        "typical": by_hand_typical,
        "kept": kept,
        "distances": distances,
    },
}
"""For each page of docs/explanation, maps the mark of each block to the function that writes the block."""

"""A report with every part, whose figures can be checked by hand."""

from typing import Any

Report = dict[str, Any]
SETTINGS = ("greedy", "T=1")
BATCHES = (1, 4, 16)
CONTEXTS = (512, 8192)
TASKS = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")
HEADS, DRAFT, LOOKUP, PEER = "heads, tree of 12", "draft model, 4 tokens", "prompt lookup", "transformers generate"
SPEEDS = {"plain": 1.0, PEER: 0.9, HEADS: 2.0, DRAFT: 2.5, LOOKUP: 1.2}
LOSSES = {"plain": 0.0, PEER: 0.0, HEADS: 0.4, DRAFT: 0.25, LOOKUP: 0.15}
"""Speed-up that each method loses when the batch size doubles, at a context of 512 tokens."""
SHORTENED = {512: 1.0, 8192: 0.4}
"""Factor of a speed-up, by context."""
COUNTS = {HEADS: {0: 40, 1: 30, 2: 20, 3: 10}, DRAFT: {0: 20, 1: 20, 2: 20, 3: 20, 4: 20}, LOOKUP: {0: 90, 8: 10}}
"""Number of target passes by number of accepted drafted tokens; each method has 100 passes."""
ENDED_IN_DRAFT = 5
"""Number of passes whose text ended one token inside the draft."""
DRAFTS = {HEADS: "deterministic", DRAFT: "sampled", LOOKUP: "deterministic"}


def estimate(value: float | None, wide: float = 0.1, observations: int = 80) -> Report:
    """Make an estimate whose interval reaches the share ``wide`` of the value to either side."""
    ends = (None, None) if value is None else (value * (1 - wide), value * (1 + wide))
    return {"value": value, "low": ends[0], "high": ends[1], "observations": observations}


def share(value: float, observations: int = 100) -> Report:
    return {"value": value, "low": 0.9 * value, "high": min(1.1 * value, 1.0), "observations": observations}


def spread(value: float) -> Report:
    return {"median": 1.1 * value, "low_quartile": value, "high_quartile": 1.2 * value, "observations": 80}


def row(setting: str, method: str, batch: int = 1, context: int | None = 512, factor: float = 1.0) -> Report:
    """Make a row of one cell; speed-ups fall with batch size and context, and are a fifth lower in sampling."""
    gained = (SPEEDS[method] - LOSSES[method] * (batch.bit_length() - 1)) * SHORTENED[context or 512] * factor
    speed = 1.0 if method == "plain" else gained * (1.0 if setting == "greedy" else 0.8)
    drafter = method if method in COUNTS else None
    return {
        "setting": setting,
        "temperature": 0 if setting == "greedy" else 1.0,
        "batch_size": batch,
        "context": context,
        "method": method,
        "label": "lossless",
        "drafter": drafter,
        "artefact": {HEADS: "heads", DRAFT: "draft"}.get(method),
        "rule": None if drafter is None else "greedy" if setting == "greedy" else "token rejection",
        "shape": {HEADS: "tree", DRAFT: "chain", LOOKUP: "chain"}.get(method),
        "drafts": None if drafter is None else "greedy" if setting == "greedy" else DRAFTS[method],
        "prompts": 80,
        "tokens_per_second": estimate(100 * speed),
        "tokens_per_second_with_prefill": estimate(90 * speed),
        "speedup_of_totals": estimate(speed, 0.0 if method == "plain" else 0.1),
        "speedup": spread(speed),
        "speedup_with_prefill_of_totals": estimate(0.9 * speed),
        "speedup_with_prefill": spread(0.9 * speed),
        "speedup_over_transformers_of_totals": estimate(speed / 0.9),
        "speedup_over_transformers": spread(speed / 0.9),
        **({"identical_to_plain": {"identical": 80, "of": 80, "largest_margin": 0.0, "ended_early": 0}}
           if setting == "greedy" else {}),
        **(_acceptance(method, speed) if drafter else {}),
    }  # fmt: skip


def _acceptance(method: str, speed: float) -> Report:
    counts = COUNTS[method]
    passes, accepted, deepest = 100, sum(length * n for length, n in counts.items()), max(counts)
    reached = [sum(n for length, n in counts.items() if length >= i) / passes for i in range(1, deepest + 1)]
    before = [1.0, *reached[:-1]]
    return {
        "passes": passes,
        "tokens_per_pass": estimate((passes + accepted - ENDED_IN_DRAFT) / passes),
        "acceptance_length": 1 + sum(reached),
        "reached": [share(value) for value in reached],
        "ended_in_draft": ENDED_IN_DRAFT,
        "conditional_acceptance": [
            share(a / b, round(100 * b)) for a, b in zip(reached, before, strict=True)
        ],
        "unconditional_acceptance": [share(value) for value in reached],
        "accepted_per_drafted": share(accepted / (100 * deepest), 100 * deepest),
        "accepted_length_histogram": {str(length): n for length, n in counts.items()},
        "time_split": {"draft": 0.3, "verify": 0.6, "overhead": 0.1},
        "predicted_speedup": speed * {HEADS: 1.05, DRAFT: 0.92, LOOKUP: 1.3}[method],
    }  # fmt: skip


def full_report(**changes: Any) -> Report:
    """Make a report with two settings, three batch sizes, two contexts and six tasks."""
    rows = [row(setting, method) for setting in SETTINGS for method in SPEEDS]
    rows += [
        {**row("T=1, typical", method), "label": "lossy", "rule": "typical acceptance"} for method in (HEADS, DRAFT)
    ]
    found = {
        "title": "A target on eighty prompts",
        "command": "headstart evaluate --target ORG/NAME",
        "settings": {"max_new_tokens": 64},
        "asked": {"template": "chat", "template_sha256": "0123456789abcdef", "turns": "first"},
        "fingerprints": {"target": "89abcdef"},
        "hardware": {"processor": "Some processor", "cores": 8, "threads": 8},
        "versions": {"torch": "2.13.0"},
        "commit": "0123456789ab",
        "dtype": "bfloat16",
        "parameters": 11_000_000,
        "prompts": 80,
        "rounds": 1,
        "max_new_tokens": 64,
        "cost_curve_ms": {str(2**power): 10 * (1 + 0.1 * power) for power in range(8)},
        "rows": rows,
        "grid": [
            row(setting, method, batch, context)
            for context in CONTEXTS
            for batch in BATCHES
            for setting in SETTINGS
            for method in SPEEDS
            if (batch, context) != (1, 512)
        ],
        "tasks": [
            {**row(setting, method, factor=1.3 - 0.15 * place), "task": task, "prompts": 10 + place}
            for place, task in enumerate(TASKS)
            for setting in SETTINGS
            for method in SPEEDS
        ],
        "samples": [
            {
                "setting": "greedy",
                "method": DRAFT,
                "task": "math_reasoning",
                "prompt": "Zoe has 3 apples and buys 4 more.\nHow many apples has she?",
                "pieces": [
                    ["Zoe", False], [" has 3 + 4 =", True], [" 7", False], [" apples.", True], ["\n", False],
                    ["The answer is", True], [" 7.", False],
                ],
            }
        ],
    }  # fmt: skip
    return {**found, **changes}


def renamed(report: Report, name: str) -> Report:
    """Return the report with ``name`` in every place for text by other people; methods, settings and tasks stay
    distinct.
    """

    def new(row: Report) -> Report:
        method = row["method"]
        for index, drafter in enumerate(COUNTS):
            method = method.replace(drafter, f"{name} {index}")
        task = {"task": f"{name} {row['task']}"} if "task" in row else {}
        return {**row, "setting": f"{name} {row['setting']}", "method": method, "rule": row["rule"] and name, **task}

    rows = {part: [new(row) for row in report[part]] for part in ("rows", "grid", "tasks")}
    about = {
        part: {f"{name} {key}": name for key in report[part]}
        for part in ("settings", "fingerprints", "versions", "asked")
    }
    texts = dict.fromkeys(("title", "command", "commit", "dtype"), name)
    samples = [
        {**dict.fromkeys(("setting", "method", "task", "prompt"), name), "pieces": [[name, True], [name, False]]}
        for _ in report["samples"]
    ]
    return {
        **report,
        **rows,
        **about,
        **texts,
        "hardware": {**report["hardware"], "processor": name},
        "samples": samples,
    }

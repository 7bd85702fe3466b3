"""Real llama.cpp in its own environment: its texts, counts and logits beside those of our own loop."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_worker import answer_of

if TYPE_CHECKING:
    from decoding.drafters import Drafter
    from decoding.model.causal_lm import CausalLM

ROOT = Path(__file__).resolve().parents[1]
PYTHON = ROOT / ".venv-engines" / "bin" / "python"
"""The Python of the environment that `make engines` makes."""
WORKER = ROOT / "benchmarks" / "served_llama_cpp.py"


@dataclass(frozen=True)
class Case:
    """One start of llama.cpp on the file ``target``, with the file ``draft`` that drafts ``tokens`` at a time, or none.

    ``drafter``: the same chain in our own loop; None for plain decoding, or where there is nothing to compare with.
    """

    artefact: str
    target: Path
    draft: Path | None = None
    tokens: int = 4
    drafter: "Drafter | None" = None
    probed: tuple[tuple[int, ...], ...] = ()
    """Texts of token ids whose next token's log-probabilities are wanted."""
    texts: tuple[str, ...] = ()
    """Texts to split into tokens."""


def serve(
    target: "CausalLM",
    cases: Sequence[Case],
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    ends: Sequence[int],
    seconds: float = 600,
) -> list[dict[str, Any]]:
    """Decode prompts of token ids greedily in llama.cpp and here; return a row for each case.

    ``target`` is the model of the targets' files, in fp32; ``ends`` are its EOS ids. All cases share one process, which
    has ``seconds``. ``ours`` of a row counts accepted tokens as llama.cpp does, without ``ended``: those that ended a
    text with drafted tokens behind them. A row that llama.cpp refused has its ``error``, and neither texts nor counts.
    `RuntimeError` if the process fails.
    """
    from trainer.export.decoded import decode_greedily

    task = [
        {
            "artefact": case.artefact,
            "target": str(case.target),
            "speculation": None if case.draft is None else {"draft": str(case.draft), "tokens": case.tokens},
            "prompts": [list(prompt) for prompt in prompts],
            "max_new_tokens": max_new_tokens,
            "probed": case.probed,
            "texts": case.texts,
        }
        for case in cases
    ]
    answer = answer_of("llama.cpp", PYTHON, WORKER, {"cases": task}, seconds)
    plain = decode_greedily(target, None, prompts, max_new_tokens, ends)
    rows = []
    for case, result in zip(cases, answer["results"], strict=True):
        row = {**result, "engine": answer["engine"], "version": answer["version"]}
        rows.append(row)
        if "error" in row:
            continue
        pairs = zip(row["texts"], plain.texts, strict=True)
        row["equal"] = sum(tuple(theirs) == ours for theirs, ours in pairs)
        if case.draft is None or case.drafter is not None:
            ours = plain if case.draft is None else decode_greedily(target, case.drafter, prompts, max_new_tokens, ends)
            accepted = [count - ended for count, ended in zip(ours.accepted, ours.ended, strict=True)]
            row["ended"] = sum(ours.ended)
            row["ours"] = {"passes": ours.passes, "drafted": ours.drafted, "accepted": accepted}
    return rows

"""Real vLLM in its own environment: its folder, and its texts and counts beside those of our own loop.

python benchmarks/vllm_engine.py    prints the folder of the environment, which `make vllm` fills
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_worker import answer_of

if TYPE_CHECKING:
    from decoding.drafters import Drafter
    from decoding.model.causal_lm import CausalLM
    from trainer.export.decoded import Decoded

ROOT = Path(__file__).resolve().parents[1]
PINS = ROOT / "requirements-vllm.lock"
WORKER = ROOT / "benchmarks" / "served_vllm.py"


def environment() -> Path:
    """Return the folder of the environment with vLLM at its pinned versions; it may not be there yet."""
    from trainer.files.folders import cache_root  # the benchmarks that load torch say first how its threads wait

    return cache_root() / "engines" / f"vllm-{hashlib.sha256(PINS.read_bytes()).hexdigest()[:12]}"


def python() -> Path | None:
    """Return the Python of that environment; None until `make vllm` has made it."""
    folder = environment()
    return folder / "bin" / "python" if (folder / ".ready").is_file() else None


@dataclass(frozen=True)
class Case:
    """One start of vLLM. ``speculation``: its speculative_config, None for plain decoding.

    ``drafter``: the same chain in our own loop; None where there is nothing to compare counts with.
    """

    artefact: str
    speculation: dict[str, Any] | None = None
    drafter: "Drafter | None" = None
    batch_sizes: tuple[int, ...] = (1, 4)


def serve(
    folder: Path,
    target: "CausalLM",
    cases: Sequence[Case],
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    seconds: float = 1800,
) -> list[dict[str, Any]]:
    """Decode prompts of token ids greedily in vLLM and here; return a row for each case and batch size.

    ``folder`` is the target's, ``target`` the same model in fp32. All cases share one process, which has ``seconds``. A
    row that vLLM refused has its ``error``, and neither texts nor counts. `RuntimeError` if the process fails.
    """
    from trainer.export.decoded import decode_greedily

    task = [
        {
            "artefact": case.artefact,
            "target": str(folder),
            "speculation": case.speculation,
            "batch_sizes": list(case.batch_sizes),
            "prompts": [list(prompt) for prompt in prompts],
            "max_new_tokens": max_new_tokens,
        }
        for case in cases
    ]
    interpreter = python()
    assert interpreter is not None, "the caller has looked"
    answer = answer_of("vLLM", interpreter, WORKER, {"cases": task}, seconds)
    plain = decode_greedily(target, None, prompts, max_new_tokens)
    ours = {"plain": plain}
    for case in cases:
        if case.speculation is not None and case.drafter is not None:
            depth = case.speculation["num_speculative_tokens"]
            ours[_key(case.speculation)] = decode_greedily(
                target, case.drafter, prompts, max_new_tokens, batch_size=4, overrun=depth
            )
    return [_row(answer, result, plain, ours.get(_key(result["speculation"]))) for result in answer["results"]]


def _key(speculation: dict[str, Any] | None) -> str:
    return "plain" if speculation is None else json.dumps(speculation, sort_keys=True)


def _row(answer: dict[str, Any], result: dict[str, Any], plain: "Decoded", ours: "Decoded | None") -> dict[str, Any]:
    """Return a result with our counts in place of its texts, which are compared with our plain decoding's."""
    row = {key: value for key, value in result.items() if key != "texts"}
    row |= {"engine": answer["engine"], "version": answer["version"], "import_seconds": answer["import_seconds"]}
    if "error" in result:
        return row
    row["equal"] = sum(tuple(theirs) == text for theirs, text in zip(result["texts"], plain.texts, strict=True))
    if ours is not None:
        row["ours"] = {"passes": ours.passes, "drafted": ours.drafted, "accepted": list(ours.accepted)}
    return row


if __name__ == "__main__":
    print(environment())

"""Runs real vLLM and llama.cpp, each in its own environment, and compares their texts and counts with our loop.

python benchmarks/engines.py    prints the folder of vLLM's environment, which `make vllm` installs
"""

import hashlib
import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from decoding.drafters import Drafter
    from decoding.model.causal_lm import CausalLM

ROOT = Path(__file__).resolve().parents[1]
LLAMA_CPP = ROOT / ".venv-engines" / "bin" / "python"
"""Python of the environment that `make engines` creates."""
Row = dict[str, Any]


def vllm_environment() -> Path:
    """Return the folder of the environment with vLLM at its pinned versions; it may not exist yet."""
    from decoding.files.stored import cache_root  # late: benchmarks first set how torch's threads wait

    pins = (ROOT / "requirements-vllm.lock").read_bytes()
    return cache_root() / "engines" / f"vllm-{hashlib.sha256(pins).hexdigest()[:12]}"


def vllm_python() -> Path | None:
    """Return the Python of vLLM's environment; None until `make vllm` has created it."""
    folder = vllm_environment()
    return folder / "bin" / "python" if (folder / ".ready").is_file() else None


@dataclass(frozen=True)
class VllmCase:
    """One start of vLLM. ``speculation``: vLLM's speculative_config; None for plain decoding.

    ``drafter``: the same chain in our loop, whose counts are compared with vLLM's counts; None for no comparison.
    """

    artefact: str
    speculation: dict[str, Any] | None = None
    drafter: "Drafter | None" = None
    batch_sizes: tuple[int, ...] = (1, 4)
    engine: dict[str, Any] = field(default_factory=dict)
    """Other arguments of vLLM's ``LLM``."""
    crowd: tuple[tuple[list[int], int], ...] = ()
    """Special prompts, each with its number of new tokens, all sent at once."""


@dataclass(frozen=True)
class LlamaCppCase:
    """One start of llama.cpp on the file ``target``. If there is a file ``draft``, each draft has ``tokens`` tokens.

    ``method``: the way of drafting, ``simple``, ``dspark`` or ``dflash``.

    ``drafter``: the same chain in our loop; None for plain decoding, or for no comparison.
    """

    artefact: str
    target: Path
    draft: Path | None = None
    tokens: int = 4
    drafter: "Drafter | None" = None
    probed: tuple[tuple[int, ...], ...] = ()
    """Texts of token ids for which log-probabilities of the next token are requested."""
    texts: tuple[str, ...] = ()
    """Texts to split into tokens."""
    method: str = "simple"

    @property
    def speculation(self) -> dict[str, Any] | None:
        """The draft's settings for the worker."""
        return None if self.draft is None else {"draft": str(self.draft), "tokens": self.tokens, "method": self.method}


def arguments_of(command: Sequence[str]) -> Row:
    """Return the arguments of a `VllmCase` that starts vLLM as a printed command does."""
    options = dict(pairwise(command))
    additional = options.get("--additional-config")
    engine = {} if additional is None else {"additional_config": json.loads(additional)}
    return {"speculation": json.loads(options["--speculative-config"]), "engine": engine}


def serve_vllm(
    folder: Path,
    target: "CausalLM",
    cases: Sequence[VllmCase],
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    seconds: float = 1800,
) -> list[Row]:
    """Decode prompts of token ids greedily in vLLM and here; return a row per case and batch size.

    ``folder`` is the target's folder, and ``target`` is the same model in fp32. All cases share one process, which may
    run for ``seconds`` seconds. If vLLM rejects a case, its row has ``error`` instead of texts and counts. Raises
    RuntimeError if the process fails.
    """
    from decoded import decode_greedily

    asked = {"target": str(folder), "prompts": [list(prompt) for prompt in prompts], "max_new_tokens": max_new_tokens}
    task = [
        asked
        | {"artefact": case.artefact, "speculation": case.speculation, "engine": case.engine}
        | {"batch_sizes": list(case.batch_sizes), "crowd": case.crowd}
        for case in cases
    ]
    interpreter = vllm_python()
    assert interpreter is not None, "the caller checks this"
    answer = _answer_of("vLLM", interpreter, "served_vllm.py", task, seconds)
    plain = decode_greedily(target, None, prompts, max_new_tokens)
    ours = {case.artefact: plain for case in cases if case.speculation is None}
    depths = {case.artefact: (case.speculation or {}).get("num_speculative_tokens", 0) for case in cases}
    for case in cases:
        if case.drafter is not None:
            ours[case.artefact] = decode_greedily(
                target, case.drafter, prompts, max_new_tokens, batch_size=4, overrun=depths[case.artefact]
            )
    rows = []
    for result in answer["results"]:
        crowd = next(case.crowd for case in cases if case.artefact == result["artefact"])
        alone = [decode_greedily(target, None, [prompt], count).texts[0] for prompt, count in crowd]
        row = _row(answer, result, alone or plain.texts)
        mine, depth = ours.get(row["artefact"]), depths[row["artefact"]]
        if "error" not in row and mine is not None:
            accepted = [*mine.accepted, *[0] * (depth - len(mine.accepted))]  # vLLM lists every position
            row["ours"] = {"passes": mine.passes, "drafted": mine.drafted, "accepted": accepted}
        rows.append(row)
    return rows


def serve_llama_cpp(
    target: "CausalLM",
    cases: Sequence[LlamaCppCase],
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    ends: Sequence[int],
    seconds: float = 600,
) -> list[Row]:
    """Decode prompts of token ids greedily in llama.cpp and here; return a row per case.

    ``target`` is the model in the target files, in fp32; ``ends`` are its EOS ids. A row's ``ours`` counts accepted
    tokens as llama.cpp does, without the tokens in `Decoded.ended`: these ended a text although drafted tokens followed
    them. Errors are as in `serve_vllm`.
    """
    from decoded import decode_greedily

    task = [
        {
            "artefact": case.artefact,
            "target": str(case.target),
            "speculation": case.speculation,
            "prompts": [list(prompt) for prompt in prompts],
            "max_new_tokens": max_new_tokens,
            "probed": case.probed,
            "texts": case.texts,
        }
        for case in cases
    ]
    answer = _answer_of("llama.cpp", LLAMA_CPP, "served_llama_cpp.py", task, seconds)
    plain = decode_greedily(target, None, prompts, max_new_tokens, ends)
    rows = []
    for case, result in zip(cases, answer["results"], strict=True):
        row = _row(answer, result, plain.texts)
        if "error" not in row and (case.draft is None or case.drafter is not None):
            ours = plain if case.draft is None else decode_greedily(target, case.drafter, prompts, max_new_tokens, ends)
            accepted = [count - ended for count, ended in zip(ours.accepted, ours.ended, strict=True)]
            accepted += [0] * (len(row["theirs"]["accepted"]) - len(accepted))  # positions without accepted tokens
            row["ended"] = sum(ours.ended)
            row["ours"] = {"passes": ours.passes, "drafted": ours.drafted, "accepted": accepted}
        rows.append(row)
    return rows


def _answer_of(engine: str, python: Path, worker: str, cases: Sequence[Row], seconds: float) -> Row:
    """Run a worker script on its cases in an engine's environment; return its JSON. Raise RuntimeError if it fails."""
    done = subprocess.run(
        [python, ROOT / "benchmarks" / worker],
        input=json.dumps({"cases": cases}),
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)},  # for our proposer
    )
    if done.returncode != 0:
        raise RuntimeError(f"{engine} ended with {done.returncode}: {done.stderr[-3000:]}")
    answer: Row = json.loads(done.stdout)
    return answer


def _row(answer: Row, result: Row, plain: Sequence[tuple[int, ...]]) -> Row:
    """Return a result with the engine's name and the number of texts that equal the texts of our plain decoding."""
    row = {**result, **{key: answer[key] for key in ("engine", "version", "import_seconds")}}
    if "error" not in row:
        row["equal"] = sum(tuple(theirs) == text for theirs, text in zip(result["texts"], plain, strict=True))
    return row


if __name__ == "__main__":
    print(vllm_environment())

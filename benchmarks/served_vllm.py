"""Texts and counters of real vLLM, to prove that exports work there: one process, one JSON task, one JSON answer.

Runs in vLLM's environment, which `make vllm` creates; imports vLLM, our proposer and the standard library. The task on
standard input is ``{"cases": [case, ...]}``. A case is

    {"artefact": NAME, "target": FOLDER, "speculation": vLLM's speculative_config or null, "prompts": [[id, ...], ...],
     "batch_sizes": [1, 4], "max_new_tokens": 96, "engine": {further arguments of vLLM's LLM},
     "crowd": [[prompt, new tokens], ...] to be sent at once, instead of "prompts"}

The answer on standard output has a result per case and batch size. ``theirs`` contains vLLM's own counters: a pass is a
step of one text after its prefill; ``accepted`` counts accepted drafted tokens by position, including those after a
text's end. vLLM does not count passes of plain decoding; their number is the number of tokens after the first.
``proposals`` of a `Recorded` proposer are (text, drafted tokens) of each draft. If vLLM rejects a case, the result has
``error`` instead of texts and counts. Decoding is greedy, in fp32; the end of text is ignored, so all texts have
``max_new_tokens`` tokens.
"""

import gc
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # keeps engine and counters in this process
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}
_COUNTERS, _PREEMPTIONS = "vllm:spec_decode_num_", "vllm:num_preemptions"
_LONGEST_ERROR = 500


def main() -> None:
    """Answer the task; all other output goes to standard error."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.environ.update(SETTINGS)
    began = time.monotonic()
    import vllm

    imported = time.monotonic() - began
    cases = json.load(sys.stdin)["cases"]
    results = [result for case in cases for result in served(case)]
    json.dump({"engine": "vllm", "version": vllm.__version__, "import_seconds": imported, "results": results}, answer)
    answer.close()


def served(case: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Start vLLM for a case and yield a result per batch size, or one result with ``error`` if vLLM does not start."""
    about = {"artefact": case["artefact"], "speculation": case["speculation"]}
    began = time.monotonic()
    try:
        llm = _started(case)
    except Exception as error:  # noqa: BLE001  # any library may fail; the error is the result
        yield about | {"error": f"{type(error).__name__}: {error}"[:_LONGEST_ERROR], "parsed": _parsed(case)}
        _forget()
        return
    setup = time.monotonic() - began
    for batch_size in case["batch_sizes"]:
        yield about | {"batch_size": batch_size, "setup_seconds": setup} | _decoded(llm, case, batch_size)
    del llm
    _forget()


def _parsed(case: dict[str, Any]) -> Any:
    """Return what vLLM's config reads from a DSpark folder that vLLM then refuses to run."""
    from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig

    if case["speculation"]["method"] != "dspark":
        return None
    target = ModelConfig(model=case["target"], dtype="float32")
    read = SpeculativeConfig(
        **{key: value for key, value in case["speculation"].items() if key != "num_speculative_tokens"},
        target_model_config=target,
        target_parallel_config=ParallelConfig(),
    )
    config = read.draft_model_config
    return [config.architectures, read.num_speculative_tokens, list(config.hf_config.target_layer_ids)]


def _started(case: dict[str, Any]) -> Any:
    from vllm import LLM

    arguments = {
        "model": case["target"],
        "dtype": "float32",
        "enforce_eager": True,
        "max_num_seqs": max(case["batch_sizes"]),
        "max_model_len": max(map(len, case["prompts"])) + 2 * case["max_new_tokens"],
        "enable_prefix_caching": False,
        "speculative_config": case["speculation"],
        "disable_log_stats": False,  # needed for counters
    }
    return LLM(**arguments | case["engine"])


def _decoded(llm: Any, case: dict[str, Any], batch_size: int) -> dict[str, Any]:
    """Decode the prompts, ``batch_size`` at a time; return texts and counts."""
    from vllm import SamplingParams

    count = case["max_new_tokens"]
    greedy = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": prompt} for prompt in case["prompts"]]
    before, began, texts = _counters(llm), time.monotonic(), []
    from recorded_proposer import PROPOSALS

    PROPOSALS.clear()
    if crowd := case["crowd"]:
        lengths = [greedy.clone() for _ in crowd]
        for place, (_, wanted) in enumerate(crowd):
            lengths[place].max_tokens = wanted
            lengths[place].prompt_logprobs = None if place % 5 else 1  # prompt_logprobs add states of prompts
        everything = [{"prompt_token_ids": prompt} for prompt, _ in crowd]
        texts = [list(output.outputs[0].token_ids) for output in llm.generate(everything, lengths, use_tqdm=False)]
        prompts = []
    for first in range(0, len(prompts), batch_size):
        outputs = llm.generate(prompts[first : first + batch_size], greedy, use_tqdm=False)
        texts += [list(output.outputs[0].token_ids) for output in outputs]
    seconds, after = time.monotonic() - began, _counters(llm)
    counted = {name: _difference(after[name], before[name]) for name in after}
    plain = {"passes": sum(len(text) - 1 for text in texts), "drafted": 0, "accepted": []}
    theirs = {
        "passes": counted["drafts"],
        "drafted": counted["draft_tokens"],
        "accepted": counted["accepted_tokens_per_pos"],
    }
    speculation = llm.llm_engine.vllm_config.speculative_config
    return {
        "method": None if speculation is None else speculation.method,
        "prompts": len(texts),
        "texts": texts,
        "theirs": plain if speculation is None else theirs,
        "preempted": counted["preemptions"],
        "proposals": list(PROPOSALS),
        "seconds": seconds,
    }


def _counters(llm: Any) -> dict[str, Any]:
    """Return vLLM's counters of speculation, by their names without the prefix; they are 0 before the first draft."""
    found: dict[str, Any] = {"drafts": 0, "draft_tokens": 0, "accepted_tokens_per_pos": [], "preemptions": 0}
    for metric in llm.get_metrics():
        if metric.name.startswith((_COUNTERS, _PREEMPTIONS)):
            found[metric.name.removeprefix(_COUNTERS).removeprefix("vllm:num_")] = getattr(
                metric, "values", None
            ) or getattr(metric, "value", 0)
    return found


def _difference(after: Any, before: Any) -> Any:
    if not isinstance(after, list):
        return after - before
    return [count - earlier for count, earlier in zip(after, before or [0] * len(after), strict=True)]


def _forget() -> None:
    """Release the engine, so that another can be started in this process."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    gc.collect()
    cleanup_dist_env_and_memory()
    gc.collect()


if __name__ == "__main__":
    main()

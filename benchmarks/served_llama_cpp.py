"""Texts, counters and logits of real llama.cpp, to prove that exports work there: one JSON task, one JSON answer.

Runs in the engines' environment, which `make engines` creates; imports only `xllamacpp` and the standard library. The
task on standard input is ``{"cases": [case, ...]}``. A case is

    {"artefact": NAME, "target": FILE, "speculation": {"draft": FILE, "tokens": K, "method": "dspark"} or null,
     "prompts": [[id, ...], ...], "max_new_tokens": n, "probed": [[id, ...], ...], "texts": [text, ...]}

The answer on standard output has a result per case. ``theirs`` contains llama.cpp's own counters: a pass is a decode of
the target after a text's prefill; ``accepted`` counts accepted drafted tokens by position, without those that end a
text and are followed by drafted tokens. ``texts`` are new token ids. ``logprobs`` are, for each text of ``probed``, the
log-probabilities of every possible next token, by token id. ``tokenised`` are llama.cpp's token ids of the case's
``texts``, with special tokens parsed. Weights are as in the files, and the cache is fp32. Decoding is greedy, on one
thread, one text at a time. If llama.cpp rejects a case, the result has ``error``.
"""

import json
import os
import re
import sys
import time
import urllib.request
from typing import Any

_GREEDY = {"temperature": 0, "cache_prompt": False}
_ALL = 1 << 30
_COUNTER = re.compile(r'^llamacpp:(\w+?)_total(?:\{position="(\d+)"\})? (\d+)$', re.MULTILINE)
_POSITIONS = "spec_decode_num_accepted_tokens_per_pos"


def main() -> None:
    """Answer the task; all other output goes to standard error."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    began = time.monotonic()
    import xllamacpp

    imported = time.monotonic() - began
    results = [served(case) for case in json.load(sys.stdin)["cases"]]
    version = f"xllamacpp {xllamacpp.__version__}"
    json.dump({"engine": "llama.cpp", "version": version, "import_seconds": imported, "results": results}, answer)
    answer.close()
    os._exit(0)  # do not wait for servers' threads


def served(case: dict[str, Any]) -> dict[str, Any]:
    """Start a server for a case and return the result, with ``error`` if the server does not start."""
    import xllamacpp

    about = {"artefact": case["artefact"], "speculation": case["speculation"], "batch_size": 1}
    began = time.monotonic()
    try:
        server = xllamacpp.Server(parameters_of(case))
    except RuntimeError as error:
        return {**about, "error": str(error)}
    ready = time.monotonic()
    texts = [_text(server, prompt, case["max_new_tokens"]) for prompt in case["prompts"]]
    ended = time.monotonic()
    return {
        **about,
        "prompts": len(texts),
        "setup_seconds": ready - began,
        "seconds": ended - ready,
        "texts": texts,
        "theirs": _counts(server.handle_metrics(), len(texts)),
        "logprobs": [_logprobs(server, prompt) for prompt in case.get("probed", ())],
        "tokenised": [_tokens(server, text) for text in case.get("texts", ())],
    }


def parameters_of(case: dict[str, Any]) -> Any:
    """Return llama.cpp's parameters for exact arithmetic that does not depend on the machine."""
    import xllamacpp

    parameters, f32 = xllamacpp.CommonParams(), xllamacpp.ggml_type.GGML_TYPE_F32
    parameters.model.path = case["target"]
    longest = max(map(len, [*case["prompts"], *case.get("probed", ())]), default=0)
    parameters.n_ctx, parameters.n_parallel, parameters.n_gpu_layers = longest + case["max_new_tokens"] + 64, 1, 0
    parameters.cache_type_k = parameters.cache_type_v = f32
    parameters.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED  # it rounds to fp16
    parameters.fit_params = parameters.warmup = False
    parameters.endpoint_metrics, parameters.verbosity = True, -1
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = 1
    if case["speculation"] is not None:
        name = f"COMMON_SPECULATIVE_TYPE_DRAFT_{case['speculation']['method'].upper()}"
        parameters.speculative.types = [getattr(xllamacpp.common_speculative_type, name)]
        draft = parameters.speculative.draft
        draft.mparams.path, draft.n_max = case["speculation"]["draft"], case["speculation"]["tokens"]
        draft.n_min, draft.p_min, draft.n_gpu_layers = 0, 0.0, 0
        draft.cache_type_k = draft.cache_type_v = f32
        draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = 1
    return parameters


def _text(server: Any, prompt: list[int], max_new_tokens: int) -> list[int]:
    """Decode one prompt greedily; return the new tokens, including the end token if any."""
    request = {"prompt": prompt, "n_predict": max_new_tokens, "return_tokens": True}
    tokens: list[int] = _post(server, "/completion", {**request, **_GREEDY})["tokens"]
    return tokens


def _counts(page: str, texts: int) -> dict[str, Any]:
    """Return llama.cpp's counters since its start; the decode of each text's prompt does not count as a pass."""
    found = _COUNTER.findall(page)
    single = {name: int(value) for name, position, value in found if not position}
    by_position = {int(position): int(value) for name, position, value in found if name == _POSITIONS and position}
    return {
        "passes": single["n_decode"] - texts,
        "drafted": single.get("spec_decode_num_draft_tokens", 0),
        "accepted": [by_position[position] for position in sorted(by_position)],
    }


def _logprobs(server: Any, prompt: list[int]) -> list[float]:
    """Return the log-probabilities of the token after a text, by token id.

    The request also forces the next token to be ``a``, by a bias, because llama.cpp holds back a token that is not a
    whole character.
    """
    certain = [[_tokens(server, "a")[-1], 1e9]]
    request = {"prompt": prompt, "n_predict": 1, "n_probs": _ALL, "logit_bias": certain}
    answer = _post(server, "/completion", {**request, **_GREEDY})
    listed = {entry["id"]: entry["logprob"] for entry in answer["completion_probabilities"][0]["top_logprobs"]}
    return [listed[token] for token in range(len(listed))]


def _tokens(server: Any, text: str) -> list[int]:
    """Return a text's tokens, including those that llama.cpp adds at its start and end."""
    request = {"content": text, "add_special": True, "parse_special": True}
    tokens: list[int] = _post(server, "/tokenize", request)["tokens"]
    return tokens


def _post(server: Any, path: str, request: dict[str, Any]) -> dict[str, Any]:
    """Send a request to the server in this process. llama.cpp's Python functions would return neither token ids nor all
    log-probabilities.
    """
    headers = {"Content-Type": "application/json"}
    asked = urllib.request.Request(server.listening_address + path, json.dumps(request).encode(), headers)
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(asked) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


if __name__ == "__main__":
    main()

"""Texts, counters and logits of real llama.cpp, for the proof that exports hold there: one JSON task, one JSON answer.

Run by the Python of the engines' own environment (`make engines` makes it); imports `xllamacpp` and the standard
library alone. The task on standard input is ``{"cases": [case, ...]}``, a case being

    {"artefact": NAME, "target": FILE, "speculation": {"draft": FILE, "tokens": K, "method": "dspark"} or null,
     "prompts": [[id, ...], ...], "max_new_tokens": n, "probed": [[id, ...], ...], "texts": [text, ...]}

The answer on standard output has one result for each case. ``theirs`` holds llama.cpp's own counters: a pass is a
decode of the target behind a text's prefill; ``accepted`` are accepted drafted tokens by position, without those that
end a text and have drafted tokens behind them. ``texts`` are new token ids, ``logprobs`` the log-probabilities of all
tokens behind each text of ``probed``, by token id, and ``tokenised`` llama.cpp's own token ids of ``texts``, special
tokens in them read as such. Weights are those of the files; the cache is fp32, sampling greedy, one thread, one text at
a time. A case that llama.cpp refuses has its ``error``.
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
    """Answer the task; whatever else is printed goes to standard error."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    began = time.monotonic()
    import xllamacpp

    imported = time.monotonic() - began
    results = [served(case) for case in json.load(sys.stdin)["cases"]]
    version = f"xllamacpp {xllamacpp.__version__}"
    json.dump({"engine": "llama.cpp", "version": version, "import_seconds": imported, "results": results}, answer)
    answer.close()
    os._exit(0)  # threads of servers have nothing left to say


def served(case: dict[str, Any]) -> dict[str, Any]:
    """Start a server for a case and return its result; one with ``error`` if it does not start."""
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
    """Return llama.cpp's parameters: exact arithmetic, and nothing that depends on the machine."""
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
    """Decode one prompt greedily; its end token, if it comes to one, is the last."""
    request = {"prompt": prompt, "n_predict": max_new_tokens, "return_tokens": True}
    tokens: list[int] = _post(server, "/completion", {**request, **_GREEDY})["tokens"]
    return tokens


def _counts(page: str, texts: int) -> dict[str, Any]:
    """Return llama.cpp's counters since it started; each text began with a decode of its prompt, which is no pass."""
    found = _COUNTER.findall(page)
    single = {name: int(value) for name, position, value in found if not position}
    by_position = {int(position): int(value) for name, position, value in found if name == _POSITIONS and position}
    return {
        "passes": single["n_decode"] - texts,
        "drafted": single.get("spec_decode_num_draft_tokens", 0),
        "accepted": [by_position[position] for position in sorted(by_position)],
    }


def _logprobs(server: Any, prompt: list[int]) -> list[float]:
    """Return the log-probabilities of the token behind a text, by token id.

    They come with a token that is made certain afterwards, an ``a``: llama.cpp keeps one back that is no whole
    character.
    """
    certain = [[_tokens(server, "a")[-1], 1e9]]
    request = {"prompt": prompt, "n_predict": 1, "n_probs": _ALL, "logit_bias": certain}
    answer = _post(server, "/completion", {**request, **_GREEDY})
    listed = {entry["id"]: entry["logprob"] for entry in answer["completion_probabilities"][0]["top_logprobs"]}
    return [listed[token] for token in range(len(listed))]


def _tokens(server: Any, text: str) -> list[int]:
    """Return a text's tokens, with those that llama.cpp adds before and behind."""
    request = {"content": text, "add_special": True, "parse_special": True}
    tokens: list[int] = _post(server, "/tokenize", request)["tokens"]
    return tokens


def _post(server: Any, path: str, request: dict[str, Any]) -> dict[str, Any]:
    """Ask the server in this process; its own functions tell neither token ids nor all log-probabilities."""
    headers = {"Content-Type": "application/json"}
    asked = urllib.request.Request(server.listening_address + path, json.dumps(request).encode(), headers)
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(asked) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


if __name__ == "__main__":
    main()

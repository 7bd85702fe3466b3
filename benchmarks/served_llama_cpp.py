"""Greedy texts, counts and log-probabilities of llama.cpp: a worker that runs in llama.cpp's own environment.

It imports `xllamacpp` and the standard library, nothing of this project. It reads a JSON object from standard input:

    target            path of a GGUF file
    draft, tokens     path of another, and the number of tokens that it drafts at a time; plain decoding without
    prompts           token ids of each prompt
    max_new_tokens    length of the longest text
    probed            token ids of texts whose next token's log-probabilities are wanted
    texts             texts to split into tokens, special tokens in them read as such
    ignore_eos        true to write on behind a text's end

and prints one, with ``engine``, ``version`` and the seconds of set-up and of decoding:

    texts             new token ids of each prompt, without the one that ended it
    drafted, accepted llama.cpp's own counters, for each prompt
    logprobs          log-probability of each token of the vocabulary, for each of ``probed``
    tokenised         token ids of each of ``texts``

Weights are those of the files. The cache is fp32, sampling greedy, one thread, one text at a time.
"""

import json
import os
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import xllamacpp

_DRAFT_SIMPLE = xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE
_F32 = xllamacpp.ggml_type.GGML_TYPE_F32


def main() -> None:
    """Serve one task, and print its findings."""
    task = json.load(sys.stdin)
    began = time.perf_counter()
    with _silence():
        server = xllamacpp.Server(_parameters(task))
    ready = time.perf_counter()
    answers = [_answer(server, task, prompt) for prompt in task.get("prompts", ())]
    ended = time.perf_counter()
    found = {
        "engine": "llama.cpp",
        "version": f"xllamacpp {xllamacpp.__version__}",
        "setup_seconds": ready - began,
        "seconds": ended - ready,
        "texts": [answer["tokens"] for answer in answers],
        "drafted": [answer["timings"].get("draft_n", 0) for answer in answers],
        "accepted": [answer["timings"].get("draft_n_accepted", 0) for answer in answers],
        "logprobs": [_logprobs(server, prompt, task["vocab_size"]) for prompt in task.get("probed", ())],
        "tokenised": [_tokenise(server, text) for text in task.get("texts", ())],
    }
    print(json.dumps(found), flush=True)
    os._exit(0)  # the server's threads have nothing left to say


def _parameters(task: dict[str, Any]) -> Any:
    """Return llama.cpp's parameters: exact arithmetic, nothing that depends on the machine."""
    parameters = xllamacpp.CommonParams()
    parameters.model.path = task["target"]
    parameters.cache_type_k = parameters.cache_type_v = _F32
    parameters.n_ctx, parameters.n_parallel, parameters.n_gpu_layers = task.get("context", 1024), 1, 0
    parameters.fit_params = parameters.warmup = False
    parameters.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    parameters.verbosity = -1
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = 1
    if task.get("draft"):
        parameters.speculative.types = [_DRAFT_SIMPLE]
        draft = parameters.speculative.draft
        draft.mparams.path, draft.n_max, draft.n_min, draft.p_min = task["draft"], task["tokens"], 0, 0.0
        draft.cache_type_k = draft.cache_type_v = _F32
        draft.n_gpu_layers = 0
        draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = 1
    return parameters


def _answer(server: Any, task: dict[str, Any], prompt: list[int]) -> dict[str, Any]:
    """Decode one prompt greedily."""
    request = {"prompt": prompt, "n_predict": task["max_new_tokens"], "ignore_eos": task.get("ignore_eos", False)}
    return _post(server, "/completion", {**request, **_GREEDY, "return_tokens": True})


_GREEDY = {"temperature": 0, "cache_prompt": False}


def _logprobs(server: Any, prompt: list[int], vocab_size: int) -> list[float]:
    """Return the log-probabilities of the token behind a text, by token id.

    They come with a token that is made certain afterwards, an ``a``: llama.cpp keeps one back that is no whole
    character.
    """
    request = {
        "prompt": prompt,
        "n_predict": 1,
        "n_probs": vocab_size,
        "logit_bias": [[_tokenise(server, "a")[-1], 1e9]],
    }
    answer = _post(server, "/completion", {**request, **_GREEDY})
    listed = {entry["id"]: entry["logprob"] for entry in answer["completion_probabilities"][0]["top_logprobs"]}
    return [listed[token] for token in range(vocab_size)]


def _tokenise(server: Any, text: str) -> list[int]:
    """Return a text's tokens, with those that llama.cpp adds before and behind."""
    request = {"content": text, "add_special": True, "parse_special": True}
    tokens: list[int] = _post(server, "/tokenize", request)["tokens"]
    return tokens


def _post(server: Any, path: str, request: dict[str, Any]) -> dict[str, Any]:
    """Ask the server in this process; its own functions offer neither token ids nor all log-probabilities."""
    address = server.listening_address + path
    headers = {"Content-Type": "application/json"}
    asked = urllib.request.Request(address, json.dumps(request).encode(), headers)
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(asked) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


@contextmanager
def _silence() -> Iterator[None]:
    """Send what the library itself prints to standard error: standard output holds the findings alone."""
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


if __name__ == "__main__":
    main()

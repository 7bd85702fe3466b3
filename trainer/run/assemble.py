"""From a recipe to what is trained: target, data, features, objective."""

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from rich.console import Console
from transformers import AutoConfig, PreTrainedTokenizerBase

from decoding.model.causal_lm import CausalLM
from decoding.model.fingerprint import fingerprint, stored_fingerprint
from decoding.model.loading import load_model, load_tokenizer, parse_dtype
from decoding.model.quantise import quantised
from trainer.data.batch import check_documents_are_apart
from trainer.data.dataset import Dataset, load_dataset
from trainer.data.source import BatchSource, Offline
from trainer.drafts.distill import DistillObjective, OnlineTeacher, TeacherSource
from trainer.drafts.on_policy import draft_source
from trainer.drafts.start import InitialDraft, initial_draft
from trainer.files.folders import check_can_be_folder
from trainer.files.shards import digest_of_each
from trainer.heads.medusa import MedusaObjective
from trainer.heads.medusa2 import Medusa2Objective
from trainer.learning.objective import Objective
from trainer.pretrain import PretrainObjective
from trainer.quickstart import resolve
from trainer.recipe.draft import DraftRecipe
from trainer.recipe.heads import FeaturesSection, MedusaRecipe
from trainer.recipe.pretrain import PretrainRecipe
from trainer.recipe.recipe import AnyRecipe
from trainer.target.features import FeatureIdentity, FeatureStore, StoredFeatures, ensure_features
from trainer.target.hidden import OnlineTarget
from trainer.target.teacher_cache import teacher_of


@dataclass(frozen=True)
class Target:
    """What is sped up. ``model`` is None where features stand in for it; ``fingerprint`` is of what is stored."""

    name: str
    model: CausalLM | None
    dtype: torch.dtype
    fingerprint: str
    rounding: str | None = None
    """How the weights of ``model`` were rounded once they were loaded."""


@dataclass(frozen=True)
class Job:
    """All that a run is made of."""

    recipe: AnyRecipe
    tokenizer: PreTrainedTokenizerBase
    dataset: Dataset
    heldout: Dataset
    target: Target | None
    objective: Objective

    def identity(self) -> dict[str, Any]:
        """What must be the same for a checkpoint to be resumed: all that changes the result of a step.

        But for the learning rate and the precision, which are what to change when the loss is no longer finite. Target,
        data and drafts are known by what is in them, wherever they lie. To be asked before anything is trained.
        """
        recipe = self.recipe
        content = recipe.model_dump(mode="json")
        for free in ("name", "output", "evaluation", "checkpoint", "tracking", "features", "target", "data"):
            content.pop(free, None)
        for free in ("micro_batch_size", "learning_rate", "mixed_precision"):
            content["training"].pop(free)
        if isinstance(recipe, MedusaRecipe):
            content["heads"].pop("tree_nodes")
            if recipe.adapters is not None:
                content["adapters"].pop("export")
            if recipe.heads.loss.soft:  # by all of the target's logits, or by the best of them
                content["features.top_k"] = recipe.features.top_k if recipe.features else 0
        if isinstance(recipe, DraftRecipe):
            content["draft"].pop("check_costs")
            assert isinstance(self.objective, DistillObjective)
            if recipe.draft.init.from_model is not None:
                content["draft"]["init"]["from_model"] = fingerprint(self.objective.module.base)
            if recipe.draft.teacher is not None:
                content["draft"]["teacher"] = {"top_k": recipe.draft.teacher.top_k, "tail": recipe.draft.teacher.tail}
        content["target weights"] = self.target.fingerprint if self.target else None
        content["training data"] = digest_of_each(self.dataset.examples)
        return content


def assemble(
    recipe: AnyRecipe,
    device: torch.device,
    console: Console,
    process_index: int = 0,
    num_processes: int = 1,
    check_draft: Callable[[CausalLM, CausalLM], None] | None = None,
) -> Job:
    """Load and check everything a recipe names, and write its features where they are wanted and not there yet.

    Every process calls this; each writes its own share of the features. ``check_draft`` may refuse a target and its
    draft, in the dtype it will decode in, before anything is spent on them.
    """
    check_folders(recipe)
    target = load_target(recipe, device)
    tokenizer = load_recipe_tokenizer(recipe)
    heldout_section = recipe.data.model_copy(update={"split": recipe.data.heldout_split, "packing": False})
    try:
        heldout = load_dataset(resolve(recipe.data.heldout), heldout_section, tokenizer)
    except ValueError as error:
        raise ValueError(f"data.heldout: {error}") from error
    dataset = load_dataset(resolve(recipe.data.train), recipe.data, tokenizer)
    torch.manual_seed(recipe.training.seed)  # where the objective starts from chance
    if isinstance(recipe, PretrainRecipe):
        return Job(recipe, tokenizer, dataset, heldout, None, PretrainObjective(tokenizer, recipe.model))
    assert target is not None and target.model is not None
    model = target.model
    if isinstance(recipe, MedusaRecipe) and recipe.features is not None:
        store = features_of(target, tokenizer, dataset, recipe.features, console, process_index, num_processes)
        objective = _objective_on_features(recipe, target, store, device)
        if not recipe.features.keep_target:
            target = replace(target, model=None)
        return Job(recipe, tokenizer, dataset, heldout, target, objective)
    if isinstance(recipe, DraftRecipe):
        initial = _initial_draft(recipe, model, tokenizer, dataset)
        if check_draft is not None:
            draft: Any = copy.deepcopy(initial.model)
            check_draft(model, CausalLM(draft.to(target.dtype), initial.output_tokens))
        target = as_teacher(recipe, target, device)
        teacher = _teacher_of(recipe, target, tokenizer, dataset, console, process_index, num_processes)
        assert target.model is not None
        distilled = DistillObjective(target.model, teacher, tokenizer, initial, recipe.draft)
        return Job(recipe, tokenizer, dataset, heldout, target, distilled)
    return Job(recipe, tokenizer, dataset, heldout, target, _heads_on(recipe, model, tokenizer))


def source_of(job: Job, process_index: int = 0, num_processes: int = 1, folder: Path | None = None) -> BatchSource:
    """Where a job's batches come from. ``folder``: see `trainer.drafts.on_policy.draft_source`."""
    recipe, examples = job.recipe, job.dataset.examples
    if not isinstance(job.objective, DistillObjective):
        return Offline(examples, recipe.training.batch_size, recipe.training.seed)
    assert isinstance(recipe, DraftRecipe) and job.target is not None and job.target.model is not None
    draft = job.objective.draft_for_decoding
    return draft_source(recipe, examples, job.target.model, job.tokenizer, draft, process_index, num_processes, folder)


def check_folders(recipe: AnyRecipe) -> None:
    """ValueError if a file stands where the recipe writes a folder."""
    check_can_be_folder(Path(recipe.output), "output")
    check_can_be_folder(Path(recipe.output) / "final", "the folder of the finished run")
    if isinstance(recipe, MedusaRecipe) and recipe.features is not None:
        check_can_be_folder(Path(recipe.features.folder), "features.folder")
    if isinstance(recipe, DraftRecipe) and recipe.draft.teacher is not None:
        check_can_be_folder(Path(recipe.draft.teacher.folder), "draft.teacher.folder")


def load_target(recipe: AnyRecipe, device: torch.device) -> Target | None:
    """The recipe's target on a device, fit for its data; None for a recipe that has none. Every process calls this."""
    if isinstance(recipe, PretrainRecipe):
        return None
    name, model = resolve(recipe.target), load_target_model(recipe, device)
    return Target(name, model, parse_dtype(recipe.dtype), _fingerprint_for_all(name, recipe.trust_remote_code))


def load_target_model(recipe: MedusaRecipe | DraftRecipe, device: torch.device) -> CausalLM:
    """The model alone, which one process may load by itself."""
    if recipe.device_map is not None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            "device_map=auto spreads the target over all devices for one process, but several were launched: launch "
            "one, or set device_map=null"
        )
    name, dtype = resolve(recipe.target), parse_dtype(recipe.dtype)
    place = torch.device("cpu") if _is_quantised(recipe) else device  # where it fits until it is
    model = CausalLM(load_model(name, dtype, place, recipe.trust_remote_code, recipe.device_map))
    if model.max_positions is not None and recipe.data.max_length > model.max_positions:
        raise ValueError(
            f"data.max_length is {recipe.data.max_length} but the target's context holds {model.max_positions} tokens: "
            f"give data.max_length={model.max_positions} or less"
        )
    if recipe.data.packing:
        check_documents_are_apart(model.model)
    return model


def _fingerprint_for_all(name: str, trust_remote_code: bool) -> str:
    """Of what is stored; read from end to end by the first process alone."""
    found: list[str | None] = [None]
    if PartialState().is_main_process:
        found = [stored_fingerprint(name, trust_remote_code)]
    (fingerprint,) = broadcast_object_list(found)
    return str(fingerprint)


def as_teacher(recipe: AnyRecipe, target: Target, device: torch.device) -> Target:
    """The target as it teaches: rounded in place if the recipe says so, which is after a draft was made of it."""
    if not _is_quantised(recipe):
        return target
    assert target.model is not None
    model: Any = quantised(target.model.model, lm_head=False)
    return replace(target, model=CausalLM(model if recipe.device_map else model.to(device)), rounding=recipe.quantise)


def _is_quantised(recipe: AnyRecipe) -> TypeGuard[DraftRecipe]:
    return isinstance(recipe, DraftRecipe) and recipe.quantise is not None


def load_recipe_tokenizer(recipe: AnyRecipe) -> PreTrainedTokenizerBase:
    """The target's, or the one that a new model is trained on."""
    if isinstance(recipe, PretrainRecipe):
        return load_tokenizer(recipe.model.tokenizer)
    return load_tokenizer(resolve(recipe.target), recipe.trust_remote_code)


def feature_identity(
    target: Target, tokenizer: PreTrainedTokenizerBase, dataset: Dataset, section: FeaturesSection
) -> FeatureIdentity:
    """What features must have been made from to be used."""
    assert target.model is not None
    return FeatureIdentity.of(target.model, target.fingerprint, tokenizer, dataset.examples, section.top_k)


def features_of(
    target: Target,
    tokenizer: PreTrainedTokenizerBase,
    dataset: Dataset,
    section: FeaturesSection,
    console: Console,
    process_index: int,
    num_processes: int,
) -> FeatureStore:
    """The features of a data set, written where they are not there yet; every process calls this."""
    assert target.model is not None
    identity = feature_identity(target, tokenizer, dataset, section)
    return ensure_features(
        target.model, dataset.examples, Path(section.folder), identity, section, console, process_index, num_processes
    )


def _heads_on(recipe: MedusaRecipe, target: CausalLM, tokenizer: PreTrainedTokenizerBase) -> Objective:
    steps = recipe.training.steps
    if recipe.adapters is not None:
        return Medusa2Objective(target, tokenizer, recipe.heads, recipe.adapters, steps)
    return MedusaObjective(OnlineTarget(target), recipe.heads, steps, target.dtype)


def _teacher_of(
    recipe: DraftRecipe,
    target: Target,
    tokenizer: PreTrainedTokenizerBase,
    dataset: Dataset,
    console: Console,
    process_index: int,
    num_processes: int,
) -> TeacherSource:
    """The target, or its logits on disk, written where they are not there yet; every process calls this."""
    assert target.model is not None
    section = recipe.draft
    if section.teacher is None:
        return OnlineTeacher(target.model)
    return teacher_of(
        target, tokenizer, dataset, section.teacher, section.loss.temperature, console, process_index, num_processes
    )


def _initial_draft(
    recipe: DraftRecipe, target: CausalLM, tokenizer: PreTrainedTokenizerBase, dataset: Dataset
) -> InitialDraft:
    return initial_draft(
        target, tokenizer, recipe.draft, dataset.examples, recipe.trust_remote_code, _longest(recipe, target)
    )


def _longest(recipe: DraftRecipe, target: CausalLM) -> int:
    """Tokens that a draft will read at most: an answer behind a prompt, which the target's context has room for."""
    policy, evaluation = recipe.draft.policy, recipe.evaluation
    answers = [policy.max_new_tokens if policy.generates else 0, evaluation.max_new_tokens if evaluation.prompts else 0]
    return min(recipe.data.max_length + max(answers), target.max_positions or 1 << 30)


def _objective_on_features(
    recipe: MedusaRecipe, target: Target, store: FeatureStore, device: torch.device
) -> MedusaObjective:
    config = AutoConfig.from_pretrained(target.name, trust_remote_code=recipe.trust_remote_code)
    states = StoredFeatures(store, config, device)
    return MedusaObjective(states, recipe.heads, recipe.training.steps, target.dtype)

"""Drafts: from a recipe to a draft to be distilled from its target or a teacher cache, and the memory for it."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from decoding.model.causal_lm import CausalLM
from decoding.model.cost_curve import Costs
from decoding.model.fingerprint import fingerprint
from trainer.data.batch import Example
from trainer.data.dataset import Dataset
from trainer.data.source import BatchSource
from trainer.data.splits import load_splits, load_training_data
from trainer.drafts.costs import best_costs, check_pays
from trainer.drafts.distill import DistillObjective, OnlineTeacher, TeacherSource
from trainer.drafts.on_policy import draft_source
from trainer.drafts.parallel import ParallelObjective
from trainer.drafts.start import InitialDraft, coverage, initial_draft
from trainer.job import (
    Largest,
    Phase,
    Stored,
    shared_identity,
    trained_itemsize,
    with_few_rows,
)
from trainer.learning.memory import frozen_forward_bytes, layer_bytes
from trainer.learning.objective import GreedyTexts
from trainer.learning.products import held_bytes
from trainer.processes import Process, from_first
from trainer.recipe.common import TrainingSection
from trainer.recipe.draft import DraftRecipe, TeacherSection
from trainer.target.loading import Target, load_target
from trainer.target.teacher_cache import TeacherStore, TeacherWriter, ensure_teacher_cache, teacher_writer

_SOFTMAXED = 8  # tensors of fp32 that a divergence makes of a block of logits


@dataclass(frozen=True)
class DraftKind:
    """The kind of a recipe for a draft: see `trainer.job.Kind`."""

    recipe: DraftRecipe

    @property
    def target(self) -> str:
        return self.recipe.target

    @property
    def tokenizer(self) -> str:
        return self.recipe.target

    @property
    def stored(self) -> Stored | None:
        teacher = self.recipe.draft.teacher
        if teacher is None:
            return None
        return Stored("draft.teacher.folder", Path(teacher.folder), partial(self._write_cache, teacher))

    @property
    def keeps_target(self) -> bool:
        return True

    @property
    def steps_per_writing(self) -> int:
        return self.recipe.draft.policy.every

    def phases(self) -> list[Phase]:
        return [Phase("a step", 0, self.recipe.training.steps)]

    def measured_from(self, phase: Phase) -> int:
        """Return a step in the middle at which texts are written: their shares may change over the run."""
        return phase.steps // 2 // self.steps_per_writing * self.steps_per_writing

    def small(self, rows: int, scratch: Path) -> DraftRecipe:
        section = self.recipe.draft
        if section.teacher is None:
            return self.recipe
        teacher = section.teacher.model_copy(update={"folder": str(scratch / "teacher")})
        draft = section.model_copy(update={"teacher": teacher})
        return self.recipe.model_copy(update={"draft": draft, **with_few_rows(self.recipe, rows)})

    def without_store(self) -> DraftRecipe:
        draft = self.recipe.draft.model_copy(update={"teacher": None})
        return self.recipe.model_copy(update={"draft": draft})

    def _write_cache(self, section: TeacherSection, device: torch.device, process: Process) -> TeacherStore:
        target = self._as_teacher(self._load_target(device), device)
        return self._cache(section, target, load_training_data(self.recipe.data, target.tokenizer), process)

    def assemble(self, device: torch.device, process: Process, check_costs: bool = False) -> "DraftJob":
        """See `trainer.job.Kind.assemble`; the draft is made of the target before that is rounded to teach."""
        recipe, target = self.recipe, self._load_target(device)
        dataset, heldout = load_splits(recipe.data, target.tokenizer)
        torch.manual_seed(recipe.training.seed)  # for weights that start at random
        trusted, longest = recipe.trust_remote_code, _longest(recipe, target.model)
        initial = initial_draft(target.model, target.tokenizer, recipe.draft, dataset.examples, trusted, longest)
        identity = _identity(recipe, target, dataset, heldout, initial)
        # Nothing is measured of a target that is quantised to teach: it is slower than the one to be sped up.
        if check_costs and recipe.draft.check_costs and recipe.quantise is None:
            _check_costs(target, initial, process)
        if initial.output_tokens is not None and process.is_first:
            share = coverage(dataset.examples, initial.output_tokens)
            process.say(f"the draft writes {len(initial.output_tokens):,} tokens, {share:.1%} of those trained")
        target = self._as_teacher(target, device)
        teacher = self._teacher(target, dataset, process)
        objective = _objective(recipe, target, teacher, initial)
        return DraftJob(recipe, dataset, heldout, target, objective, identity)

    def _load_target(self, device: torch.device) -> Target:
        """Load the target; a target to be rounded goes to the CPU first, where it fits whole."""
        return load_target(self.recipe, device if self.recipe.quantise is None else torch.device("cpu"))

    def _as_teacher(self, target: Target, device: torch.device) -> Target:
        """Return the target that teaches: rounded, if the recipe asks for it."""
        if self.recipe.quantise is None:
            return target
        return target.rounded(self.recipe.quantise, device)

    def _teacher(self, target: Target, dataset: Dataset, process: Process) -> TeacherSource:
        """Return the target itself, or its logits on disk."""
        section = self.recipe.draft.teacher
        if section is None:
            return OnlineTeacher(target.model)
        return self._cache(section, target, dataset, process)

    def _cache(self, section: TeacherSection, target: Target, dataset: Dataset, process: Process) -> TeacherStore:
        """Return the teacher cache of the training data, written where it is not there yet."""
        temperature = self.recipe.draft.loss.temperature
        writer = teacher_writer(target, dataset.examples, section, temperature)
        return ensure_teacher_cache(writer, dataset.examples, section, process)


@dataclass(frozen=True)
class DraftJob:
    """A draft to be trained: see `trainer.job.Job`."""

    recipe: DraftRecipe
    dataset: Dataset
    heldout: Dataset
    target: Target
    objective: DistillObjective
    identity: Mapping[str, Any]

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.target.tokenizer

    def source(self, section: TrainingSection, process: Process, folder: Path | None = None) -> BatchSource:
        recipe = self.recipe.model_copy(update={"training": section})
        draft = self.objective.writing_draft
        return draft_source(recipe, self.dataset.examples, self.target.model, self.tokenizer, draft, process, folder)

    def writer(self, examples: Sequence[Example]) -> TeacherWriter | None:
        section, temperature = self.recipe.draft.teacher, self.recipe.draft.loss.temperature
        return None if section is None else teacher_writer(self.target, examples, section, temperature)

    def target_again(self, device: torch.device) -> Target:
        return self.target

    def choose_tree(self, target: CausalLM, texts: GreedyTexts) -> None:
        self.objective.choose_tree(target, texts)

    def passing_bytes(self, largest: Largest) -> int:
        """See `trainer.job.Job.passing_bytes`: layers, chunks of logits, and the gradients of what these come from."""
        section, itemsize = self.recipe.draft, trained_itemsize(self.recipe)
        teaching = 0 if section.teacher else frozen_forward_bytes(self.target.model, largest.positions)
        seen = 0
        if section.parallel is not None:  # at most; the target reads none of the masks
            rows = self.recipe.training.micro_batch_size
            masks = rows * section.parallel.anchors * (section.parallel.tokens - 1)
            largest = Largest(largest.positions + masks, largest.trained + masks)
            # Which keys each query sees, as booleans and as numbers that are added.
            seen = largest.positions**2 // rows * (1 + self.objective.module.base.dtype.itemsize)
        draft = CausalLM(self.objective.module.base)
        lm_head = self.objective.module.base.get_output_embeddings().weight
        sides = 1 if section.teacher else 2
        logits = held_bytes(largest.trained, len(lm_head), itemsize, lm_head.device, sides, _SOFTMAXED)
        gradients = largest.trained * draft.hidden_size * itemsize
        gradients += 8 * lm_head.numel() if lm_head.requires_grad else 0
        layers = largest.positions * draft.num_layers * layer_bytes(draft, itemsize, adapted=section.lora is not None)
        return layers + logits + gradients + teaching + seen

    def artefact_bytes(self) -> dict[str, int]:
        """See `trainer.job.Job.artefact_bytes`: the whole draft, its adapters merged, with a parallel draft's parts."""
        modules = (self.objective.module.base, self.objective.module.parts)
        numbers = sum(
            parameter.numel() for module in modules if module is not None for parameter in module.parameters()
        )
        return {"the finished artefact": numbers * self.target.dtype.itemsize}


def _objective(recipe: DraftRecipe, target: Target, teacher: TeacherSource, initial: InitialDraft) -> DistillObjective:
    given = target.model, teacher, target.tokenizer, initial, recipe.draft
    if recipe.draft.parallel is None:
        return DistillObjective(*given)
    return ParallelObjective(*given, recipe.training.seed)


def _identity(
    recipe: DraftRecipe, target: Target, dataset: Dataset, heldout: Dataset, initial: InitialDraft
) -> dict[str, Any]:
    """See `trainer.job.Job.identity`; a draft that training starts from is known by its weights."""
    section, content = recipe.draft, shared_identity(recipe, target, dataset, heldout)
    if section.init.from_model is not None:
        content["draft"]["init"]["from_model"] = fingerprint(initial.model)
        if initial.parts is not None:
            content["draft"]["init"]["from_model's parts"] = fingerprint(initial.parts)
    if section.teacher is not None:
        content["draft"]["teacher"] = {"top_k": section.teacher.top_k, "tail": section.teacher.tail}
    return content


def _longest(recipe: DraftRecipe, target: CausalLM) -> int:
    """Return the most tokens that a draft will read at once: a prompt with its answer, in the target's context."""
    policy, evaluation = recipe.draft.policy, recipe.evaluation
    answers = [policy.max_new_tokens if policy.generates else 0, evaluation.max_new_tokens if evaluation.prompts else 0]
    return min(recipe.data.max_length + max(answers), target.max_positions or 1 << 30)


def _check_costs(target: Target, initial: InitialDraft, process: Process) -> None:
    """Refuse a draft that could not pay, on every process by the costs that the first one measures.

    The draft is measured in the dtype that it will decode in.
    """

    def measure() -> Costs:
        draft: Any = copy.deepcopy(initial.model)
        at_once = 1 if initial.parts is None else initial.parts.config.tokens
        return best_costs(target.model, CausalLM(draft.to(target.dtype).eval(), initial.output_tokens), at_once)

    process.say(check_pays(from_first(measure)))

"""The job of a draft: builds the objective from a recipe, and the initial DSpark draft."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from decoding.model.causal_lm import CausalLM
from decoding.model.dspark import DSparkDraft
from decoding.model.dspark_config import GPU_HEAD_DIMS, DSparkConfig
from decoding.model.eagle3 import Eagle3Draft
from decoding.model.fingerprint import fingerprint
from decoding.model.hub import local_folder
from trainer.data.batch import Example
from trainer.data.dataset import Dataset
from trainer.drafts.distill import DistillObjective, OnlineTeacher, TeacherSource
from trainer.drafts.dspark import DSparkObjective
from trainer.drafts.dspark_start import SCALED, initial_dspark, rotary_of, start_dspark
from trainer.drafts.eagle3 import Eagle3Objective, initial_eagle3
from trainer.drafts.on_policy import policy_source
from trainer.drafts.start import InitialDraft, initial_draft
from trainer.job import Job, shared_identity
from trainer.processes import Process
from trainer.recipe.draft import DraftRecipe
from trainer.target.features import StoredTaps, ensure_features
from trainer.target.loading import OnlineTarget, Target, load_data, load_target
from trainer.target.teacher_cache import ensure_teacher_cache
from trainer.target.vocabulary import say_coverage

_Initial = InitialDraft | DSparkDraft | Eagle3Draft


def assemble_draft(recipe: DraftRecipe, device: torch.device, process: Process, begins: bool = False) -> Job:
    """Load and check everything that the recipe names, and write missing features or teacher logits.

    Every process calls this. ``begins``: see `trainer.run.train`.
    """
    if (start := recipe.draft.init.from_model) is not None:
        local_folder(start, weights=False)  # a misspelt name ends the run before the target is loaded
    tokenizer, dataset, heldout = load_data(recipe)
    target = load_target(recipe, device, tokenizer)
    torch.manual_seed(recipe.training.seed)  # for random initial weights
    trusted, longest = recipe.trust_remote_code, _longest(recipe, target.model)
    section, examples = recipe.draft, dataset.examples
    initial: _Initial
    objective: DistillObjective | DSparkObjective | Eagle3Objective
    if section.dspark is not None:
        initial = _dspark(recipe, target, examples, process, begins)
    elif section.eagle3 is not None:
        initial = initial_eagle3(target.model, target.tokenizer, section, examples)
        layers = ", ".join(map(str, initial.config.target_layer_ids))
        process.say(f"the draft reads the target's layers {layers}; training unrolls {section.eagle3.steps} steps")
    else:
        initial = initial_draft(target.model, target.tokenizer, section, examples, trusted, longest)
    whole = isinstance(initial, Eagle3Draft) and initial.config.draft_vocab_size == initial.config.vocab_size
    say_coverage(process, "the draft", examples, None if whole else initial.output_tokens)
    identity = _identity(recipe, target, dataset, heldout, initial)
    if not isinstance(initial, InitialDraft):
        if (size := initial.config.head_dim) not in GPU_HEAD_DIMS:
            process.say(f"warning: the draft's attention heads are {size} wide; on GPUs vLLM and SGLang need 64 or 128")
        kind = rotary_of(target.model).get("rope_type", "default")
        if kind not in ("default", *SCALED, *(["llama3"] if section.eagle3 else [])):
            process.say(
                f"the draft's rotary embeddings are not scaled like the target's ({kind}), for llama.cpp's sake"
            )
        taps, seed = initial.config.target_layer_ids, recipe.training.seed
        states = OnlineTarget(target.model)
        if recipe.features is not None:
            states = StoredTaps(target.model, ensure_features(target, examples, recipe.features, process, taps))
        if isinstance(initial, DSparkDraft):
            objective = DSparkObjective(target.model, target.tokenizer, initial, section, seed, states)
        else:
            objective = Eagle3Objective(target.model, initial, section, seed, states)
    else:
        teacher = _teacher(recipe, target, dataset, process)
        objective = DistillObjective(target.model, teacher, target.tokenizer, initial, section)
    source = None
    if recipe.draft.policy.generates:
        draft = objective.writing_draft
        source = partial(policy_source, recipe, examples, target.model, target.tokenizer, draft)
    return Job(recipe, target.tokenizer, dataset, heldout, target, objective, identity, source)


def _dspark(
    recipe: DraftRecipe, target: Target, examples: Sequence[Example], process: Process, begins: bool
) -> DSparkDraft:
    """Return the initial DSpark draft, and print its size, mask token and other choices."""
    section, dspark = recipe.draft, recipe.draft.dspark
    assert dspark is not None, "the recipe asks for a DSpark draft"
    initial = initial_dspark(target.model, target.tokenizer, section, examples)
    fits = begins and dspark.fit_tokens and section.init.from_model is None and initial.markov is not None
    if fits and (online := OnlineTarget(target.model)).transform is None:  # a scale would make the regression wrong
        process.say(
            f"the draft's bias starts as a regression on up to {dspark.fit_tokens:,} tokens (draft.dspark.fit_tokens)"
        )
        start_dspark(initial, online, examples, dspark.fit_tokens)
    layers = ", ".join(map(str, initial.config.target_layer_ids))
    mask = initial.config.mask_token_id
    name = target.tokenizer.convert_ids_to_tokens(mask) or f"token {mask}, which has no text"
    process.say(f"the draft reads the target's layers {layers}; its mask is {name}")
    if (nodes := dspark.tree_nodes) and recipe.evaluation.prompts:
        process.say(f"evaluations draft chains, as servers do; the finished draft uses a tree of {nodes} here")
    return initial


def _teacher(recipe: DraftRecipe, target: Target, dataset: Dataset, process: Process) -> TeacherSource:
    section = recipe.draft.teacher
    if section is None:
        return OnlineTeacher(target.model)
    return ensure_teacher_cache(target, dataset.examples, section, recipe.draft.loss.temperature, process)


def _identity(
    recipe: DraftRecipe, target: Target, dataset: Dataset, heldout: Dataset, initial: _Initial
) -> dict[str, Any]:
    """Return `trainer.job.Job.identity`, in which the fingerprint of its weights stands for a draft to start from."""
    section, content = recipe.draft, shared_identity(recipe, target, dataset, heldout)
    content["features"] = {"states": recipe.features.states if recipe.features else "target"}
    if section.init.from_model is not None:
        draft = initial.model if isinstance(initial, InitialDraft) else initial
        content["draft"]["init"]["from_model"] = fingerprint(draft)
    if isinstance(initial, DSparkDraft):
        for name in ("rope_theta", "rms_norm_eps"):  # runs of earlier versions had the same defaults for any target
            value = getattr(initial.config, name)
            content["draft"]["dspark"][name] = None if value == getattr(DSparkConfig, name) else value
        if initial.config.rope_scaling:  # runs of earlier versions did not have this setting
            content["draft"]["dspark"]["rope_scaling"] = dict(initial.config.rope_scaling)
    if section.teacher is not None:
        content["draft"]["teacher"] = {"top_k": section.teacher.top_k, "tail": section.teacher.tail}
    return content


def _longest(recipe: DraftRecipe, target: CausalLM) -> int:
    """Return the length of the longest text that the draft reads: prompt and answer, within the target's context."""
    policy, evaluation = recipe.draft.policy, recipe.evaluation
    answers = [policy.max_new_tokens if policy.generates else 0, evaluation.max_new_tokens if evaluation.prompts else 0]
    return min(recipe.data.max_length + max(answers), target.max_positions or 1 << 30)

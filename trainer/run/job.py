"""`Job`: everything that one training run needs, and `assemble`, which makes it from a recipe.

`assemble` is the only dispatch from a recipe to its kind; no other code checks the class of a recipe or an objective.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from decoding.errors import UserError
from decoding.files.fingerprint import stored_fingerprint
from decoding.files.hub import local_folder
from decoding.model.dspark_config import GPU_HEAD_DIMS
from decoding.model.dspark_draft import DSparkDraft
from decoding.model.eagle3_draft import Eagle3Draft
from decoding.model.loading import load_config
from trainer.data.batch import BatchSource, Offline
from trainer.data.dataset import Dataset
from trainer.drafts.distill import DistillObjective, OnlineTeacher, TeacherSource
from trainer.drafts.dspark_start import SCALED, initial_dspark, rotary_of, start_dspark
from trainer.drafts.dspark_training import DSparkObjective
from trainer.drafts.eagle3_training import Eagle3Objective, initial_eagle3
from trainer.drafts.on_policy import policy_source
from trainer.drafts.start import initial_draft
from trainer.files.folders import fingerprint_of_all
from trainer.heads.medusa1 import MedusaObjective, check_init, start_heads, with_sharing
from trainer.heads.medusa2 import Medusa2Objective
from trainer.learning.objective import Objective, checkpoint_layers
from trainer.processes import Process, from_first
from trainer.recipe.draft import DraftRecipe
from trainer.recipe.heads import MedusaRecipe
from trainer.recipe.reading import AnyRecipe
from trainer.target.features import StoredFeatures, StoredTaps, ensure_features
from trainer.target.initial import fit_states, most_frequent_trained, say_coverage
from trainer.target.loading import (
    HiddenStates,
    OnlineTarget,
    StoredTarget,
    Target,
    load_data,
    load_target,
    load_target_model,
    logit_transform,
)
from trainer.target.teacher_cache import ensure_teacher_cache


@dataclass(frozen=True)
class Job:
    """Recipe, data, target and objective of one run, for heads or a draft."""

    recipe: AnyRecipe
    tokenizer: PreTrainedTokenizerBase
    dataset: Dataset
    """The training data."""
    heldout: Dataset
    target: StoredTarget
    """A `Target` if the model is loaded, or a `StoredTarget` if it was released to free memory."""
    objective: Objective
    source: BatchSource
    """The training batches: from the data, or with texts that are written during training."""
    origin: Mapping[str, Any]
    """The recipe as plain JSON values; `trainer.run.checkpoint` uses it to recognise the run.

    Target, data and drafts appear as fingerprints of their initial content, not as paths."""

    def target_again(self, device: torch.device) -> Target:
        """Return the target for the last evaluation; reload it if it was released."""
        if isinstance(self.target, Target):
            return self.target
        assert isinstance(self.recipe, MedusaRecipe), "only training on stored features releases the target"
        return self.target.loaded(load_target_model(self.recipe, device))

    @property
    def trained_numbers(self) -> int:
        """The number of trained parameters."""
        return sum(p.numel() for p in self.objective.module.parameters() if p.requires_grad)


def assemble(recipe: AnyRecipe, device: torch.device, process: Process, begins: bool = False) -> Job:
    """Load and check everything that the recipe names, and write the missing part of its `store`.

    Every process calls this. ``begins`` means that no weights of an earlier start will be loaded, so initial weights
    are fitted to the target.
    """
    if isinstance(recipe, MedusaRecipe):
        return _heads_job(recipe, device, process, begins)
    return _draft_job(recipe, device, process, begins)


def _origin(recipe: AnyRecipe, target: StoredTarget, dataset: Dataset, heldout: Dataset) -> dict[str, Any]:
    content = recipe.model_dump(mode="json", exclude={"target", "data"})
    content["target weights"] = target.fingerprint
    content["training data"] = fingerprint_of_all(example.content() for example in dataset.examples)
    content["held-out data"] = fingerprint_of_all(example.content() for example in heldout.firsts)
    # ``states`` is the only setting in the section ``features`` that changes the run.
    content["features"] = {"states": recipe.features.states if recipe.features else "target"}
    if isinstance(recipe, DraftRecipe):
        if (start := recipe.draft.init.from_model) is not None:
            content["draft"]["init"]["from_model"] = stored_fingerprint(start, recipe.trust_remote_code)
        if (section := recipe.draft.teacher) is not None:
            content["draft"]["teacher"] = {"top_k": section.top_k, "tail": section.tail}
    return content


# --- heads ------------------------------------------------------------------------------------------------------------


def _heads_job(recipe: MedusaRecipe, device: torch.device, process: Process, begins: bool) -> Job:
    check_init(recipe.heads)
    tokenizer, dataset, heldout = load_data(recipe)
    target = load_target(recipe, device, tokenizer)
    model, examples = target.model, dataset.examples
    heads, said = with_sharing(recipe.heads, model.model)
    process.say(said)
    transform = logit_transform(model.model.config.get_text_config(decoder=True))
    if recipe.adapters is not None or transform is not None:  # a scale of the logits would spoil the regression
        heads = heads.model_copy(update={"fit_tokens": 0})
    recipe = recipe.model_copy(update={"heads": heads})
    written = None
    if (count := heads.vocabulary) is not None and heads.init is None and count < model.vocab_size:
        if not heads.shared_lm_head:
            raise UserError(f"heads.vocabulary is {count}, but {said}: set heads.shared_lm_head=true, or omit this key")
        written = most_frequent_trained(count, model.vocab_size, model, tokenizer, examples, "heads.vocabulary")
    training, features = recipe.training, recipe.features
    torch.manual_seed(training.seed)  # for random initial weights
    kept: StoredTarget = target
    states: HiddenStates | None = None
    objective: MedusaObjective | Medusa2Objective
    if recipe.adapters is not None:
        objective = Medusa2Objective(model, tokenizer, heads, recipe.adapters, training.steps, written)
    else:
        if features is None:
            states = OnlineTarget(model)
        else:
            store = ensure_features(target, examples, features, process)
            states = StoredFeatures(store, load_config(target.name, recipe.trust_remote_code), device)
            kept = target if features.keep_target else target.let_go()
        objective = MedusaObjective(states, heads, training.steps, target.dtype, written)
    say_coverage(process, "the heads", examples, objective.heads.output_tokens)
    if begins and heads.init is None and heads.markov_rank and heads.fit_tokens:
        process.say(
            f"the heads start from a regression on the target's states at up to {heads.fit_tokens:,} tokens "
            "(heads.fit_tokens)"
        )
        assert states is not None, "heads of Medusa-2 are not fitted"
        fitted = states
        fit = from_first(
            lambda: fit_states(fitted, examples, heads.num_heads, heads.fit_tokens).start(heads.markov_rank)
        )
        start_heads(objective.heads, fit, states.lm_head)
    source = Offline(examples, training.batch_size, training.seed)
    origin = _origin(recipe, target, dataset, heldout)
    return Job(recipe, tokenizer, dataset, heldout, kept, objective, source, origin)


# --- drafts -----------------------------------------------------------------------------------------------------------


def _draft_job(recipe: DraftRecipe, device: torch.device, process: Process, begins: bool) -> Job:
    section, training = recipe.draft, recipe.training
    if section.init.from_model is not None:
        local_folder(section.init.from_model, weights=False)  # a misspelt name ends the run before the target is loaded
    tokenizer, dataset, heldout = load_data(recipe)
    target = load_target(recipe, device, tokenizer)
    torch.manual_seed(training.seed)  # for random initial weights
    objective: DistillObjective | DSparkObjective | Eagle3Objective
    if section.over_states is None:
        objective = _distillation(recipe, target, dataset, process)
    else:
        objective = _over_states(recipe, target, dataset, process, begins)
    if section.gradient_checkpointing:
        checkpoint_layers(objective.module.draft)
    source: BatchSource = Offline(dataset.examples, training.batch_size, training.seed)
    if section.policy.generates:
        copied = objective.decoding_copy
        source = policy_source(recipe, dataset.examples, target.model, tokenizer, copied, process)
    origin = _origin(recipe, target, dataset, heldout)
    return Job(recipe, tokenizer, dataset, heldout, target, objective, source, origin)


def _distillation(recipe: DraftRecipe, target: Target, dataset: Dataset, process: Process) -> DistillObjective:
    section, policy, evaluation = recipe.draft, recipe.draft.policy, recipe.evaluation
    answers = [policy.max_new_tokens if policy.generates else 0, evaluation.max_new_tokens if evaluation.prompts else 0]
    longest = min(recipe.data.max_length + max(answers), target.model.max_positions or 1 << 30)
    trusted, examples = recipe.trust_remote_code, dataset.examples
    initial = initial_draft(target.model, target.tokenizer, section, examples, trusted, longest)
    say_coverage(process, "the draft", examples, initial.output_tokens)
    teacher: TeacherSource = OnlineTeacher(target.model)
    if section.teacher is not None:
        teacher = ensure_teacher_cache(target, examples, section.teacher, section.loss.temperature, process)
    return DistillObjective(target.model, teacher, target.tokenizer, initial, section)


def _over_states(
    recipe: DraftRecipe, target: Target, dataset: Dataset, process: Process, begins: bool
) -> DSparkObjective | Eagle3Objective:
    """Return the objective of a draft that reads the target's states; print which layers the draft reads, and other
    choices.
    """
    section, examples, seed = recipe.draft, dataset.examples, recipe.training.seed
    draft: DSparkDraft | Eagle3Draft
    if section.dspark is not None:
        draft = initial_dspark(target.model, target.tokenizer, section, examples)
        new, fitted = begins and section.init.from_model is None, section.dspark.fit_tokens
        online = OnlineTarget(target.model)
        # A transform of the logits would make the regression wrong by a scale.
        if new and fitted and draft.markov is not None and online.transform is None:
            process.say(f"the bias starts from a regression on up to {fitted:,} tokens (draft.dspark.fit_tokens)")
            start_dspark(draft, online, examples, fitted)
        mask = draft.config.mask_token_id
        named = target.tokenizer.convert_ids_to_tokens(mask) or f"token {mask}, which has no text"
        particular = f"its mask token is {named}"
    else:
        assert section.eagle3 is not None, "the recipe asks for a draft over states"
        draft = initial_eagle3(target.model, target.tokenizer, section, examples)
        particular = f"training unrolls {section.eagle3.steps} steps"
    config = draft.config
    process.say(f"the draft reads the target's layers {', '.join(map(str, config.target_layer_ids))}; {particular}")
    if section.dspark is not None and section.dspark.tree_nodes and recipe.evaluation.prompts:
        nodes = section.dspark.tree_nodes
        process.say(f"evaluations use chains, as servers do; the finished draft uses a tree of {nodes} nodes")
    reduced = config.draft_vocab_size not in (None, config.vocab_size)
    say_coverage(process, "the draft", examples, draft.output_tokens if reduced else None)
    if config.head_dim not in GPU_HEAD_DIMS:
        process.say(
            f"warning: the draft's attention heads have width {config.head_dim}; on GPUs vLLM and SGLang need 64 or 128"
        )
    kind = rotary_of(target.model).get("rope_type", "default")
    if kind not in ("default", *SCALED, *(["llama3"] if section.eagle3 else [])):
        process.say(f"the draft's rotary embeddings are not scaled, because llama.cpp cannot scale them by {kind}")
    states = OnlineTarget(target.model)
    if recipe.features is not None:
        store = ensure_features(target, examples, recipe.features, process, config.target_layer_ids)
        states = StoredTaps(target.model, store)
    if isinstance(draft, DSparkDraft):
        return DSparkObjective(target.model, target.tokenizer, draft, section, seed, states)
    return Eagle3Objective(target.model, draft, section, seed, states)

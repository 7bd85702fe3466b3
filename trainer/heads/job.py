"""The job that trains heads: builds the objective from a recipe, on the target or on its stored features."""

from functools import partial
from typing import Any

import torch

from decoding.errors import UserError
from decoding.model.loading import load_config
from trainer.heads.medusa import MedusaObjective, check_init, start_heads, with_sharing
from trainer.heads.medusa2 import Medusa2Objective
from trainer.job import Job, shared_identity
from trainer.processes import Process, from_first
from trainer.recipe.heads import MedusaRecipe
from trainer.target.features import StoredFeatures, ensure_features
from trainer.target.least_squares import fit_states
from trainer.target.loading import HiddenStates, OnlineTarget, StoredTarget, load_data, load_target, logit_transform
from trainer.target.vocabulary import most_frequent_trained, say_coverage


def assemble_heads(recipe: MedusaRecipe, device: torch.device, process: Process, begins: bool = False) -> Job:
    """Load and check everything that the recipe names, and write missing features.

    Every process calls this. ``begins``: see `trainer.run.train`.
    """
    check_init(recipe.heads)
    tokenizer, dataset, heldout = load_data(recipe)
    target = load_target(recipe, device, tokenizer)
    heads, said = with_sharing(recipe.heads, target.model.model)
    process.say(said)
    transform = logit_transform(target.model.model.config.get_text_config(decoder=True))
    if recipe.adapters is not None or transform is not None:  # the regression of states would be wrong by this scale
        heads = heads.model_copy(update={"fit_tokens": 0})
    recipe = recipe.model_copy(update={"heads": heads})
    written = None
    if (count := heads.vocabulary) is not None and heads.init is None and count < target.model.vocab_size:
        if not heads.shared_lm_head:
            raise UserError(f"heads.vocabulary is {count}, but {said}: set heads.shared_lm_head=true, or leave it out")
        model, setting = target.model, "heads.vocabulary"
        written = most_frequent_trained(count, model.vocab_size, model, tokenizer, dataset.examples, setting)
    torch.manual_seed(recipe.training.seed)  # for random initial weights
    kept: StoredTarget = target
    objective: MedusaObjective | Medusa2Objective
    steps, features = recipe.training.steps, recipe.features
    if features is not None:
        store = ensure_features(target, dataset.examples, features, process)
        config = load_config(target.name, recipe.trust_remote_code)
        stored = StoredFeatures(store, config, device)
        states: HiddenStates | None = stored
        objective = MedusaObjective(stored, recipe.heads, steps, target.dtype, written)
        kept = target if features.keep_target else target.let_go()
    elif recipe.adapters is not None:
        states = None
        objective = Medusa2Objective(target.model, target.tokenizer, recipe.heads, recipe.adapters, steps, written)
    else:
        states = OnlineTarget(target.model)
        objective = MedusaObjective(states, recipe.heads, steps, target.dtype, written)
    say_coverage(process, "the heads", dataset.examples, objective.heads.output_tokens)
    if begins and heads.init is None and heads.markov_rank and heads.fit_tokens:
        assert states is not None, "heads of Medusa-2 are not fitted"
        process.say(
            f"the heads start as a regression of the target's states on up to {heads.fit_tokens:,} tokens "
            "(heads.fit_tokens)"
        )
        fit = partial(fit_states, states, dataset.examples, heads.num_heads, heads.fit_tokens)
        start_heads(objective.heads, from_first(lambda: fit().start(heads.markov_rank)), states.lm_head)
    identity: dict[str, Any] = shared_identity(recipe, target, dataset, heldout)
    identity["features"] = {
        "states": features.states if features else "target"
    }  # the only setting in the section features that changes the run
    return Job(recipe, target.tokenizer, dataset, heldout, kept, objective, identity)

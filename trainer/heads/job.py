"""The job of heads: from a recipe to an objective on the target or its stored features."""

from typing import Any

import torch

from decoding.model.loading import load_config
from trainer.heads.medusa import MedusaObjective, check_init, start_heads, with_sharing
from trainer.heads.medusa2 import Medusa2Objective
from trainer.job import Job, shared_identity
from trainer.learning.least_squares import fit_states
from trainer.processes import Process
from trainer.recipe.heads import MedusaRecipe
from trainer.target.features import StoredFeatures, ensure_features
from trainer.target.hidden import HiddenStates, OnlineTarget
from trainer.target.loading import StoredTarget, load_data, load_target


def assemble_heads(recipe: MedusaRecipe, device: torch.device, process: Process) -> Job:
    """Load and check everything that the recipe names, and write missing features. Every process calls this."""
    check_init(recipe.heads)
    tokenizer, dataset, heldout = load_data(recipe)
    target = load_target(recipe, device, tokenizer)
    heads, said = with_sharing(recipe.heads, target.model.model)
    process.say(said)
    states: HiddenStates = OnlineTarget(target.model)
    if recipe.adapters is not None or states.transform is not None:  # a regression of states would be off by a scale
        heads = heads.model_copy(update={"fit_tokens": 0})
    recipe = recipe.model_copy(update={"heads": heads})
    torch.manual_seed(recipe.training.seed)  # for random initial weights
    kept: StoredTarget = target
    objective: MedusaObjective | Medusa2Objective
    steps, features = recipe.training.steps, recipe.features
    if features is not None:
        store = ensure_features(target, dataset.examples, features, process)
        config = load_config(target.name, recipe.trust_remote_code)
        states = StoredFeatures(store, config, device)
        objective = MedusaObjective(states, recipe.heads, steps, target.dtype)
        kept = target if features.keep_target else target.let_go()
    elif recipe.adapters is not None:
        objective = Medusa2Objective(target.model, target.tokenizer, recipe.heads, recipe.adapters, steps)
    else:
        objective = MedusaObjective(states, recipe.heads, steps, target.dtype)
    if isinstance(objective, MedusaObjective) and objective.module.heads.config.linear and heads.init is None:
        most = min(heads.fit_tokens, sum(len(example.tokens) for example in dataset.examples))
        process.say(f"the heads start as a regression of the target's states on {most:,} tokens (heads.fit_tokens)")
        fit = fit_states(states, dataset.examples, heads.num_heads, most, device)
        start_heads(objective.module.heads, fit, states.lm_head)
    identity: dict[str, Any] = shared_identity(recipe, target, dataset, heldout)
    identity["features"] = {
        "states": features.states if features else "target"
    }  # the only setting of features that changes the run
    return Job(recipe, target.tokenizer, dataset, heldout, kept, objective, identity)

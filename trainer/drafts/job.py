"""The job of a draft: from a recipe to an objective, its DSpark start, and the check that the draft can pay."""

import copy
import math
from functools import partial
from typing import Any, NamedTuple

import torch

from decoding.errors import UserError
from decoding.metrics import break_even
from decoding.model.causal_lm import CausalLM
from decoding.model.cost_curve import Costs, measure_costs
from decoding.model.dspark import DSpark, DSparkDraft
from decoding.model.dspark_config import GPU_HEAD_DIMS, DSparkConfig
from decoding.model.fingerprint import fingerprint
from decoding.model.hub import local_folder
from trainer.data.dataset import Dataset
from trainer.drafts.distill import DistillObjective, OnlineTeacher, TeacherSource
from trainer.drafts.dspark import DSparkObjective
from trainer.drafts.dspark_start import SCALED, initial_dspark, rotary_of, start_dspark
from trainer.drafts.on_policy import policy_source
from trainer.drafts.start import InitialDraft, initial_draft
from trainer.job import Job, shared_identity
from trainer.processes import Process, from_first
from trainer.recipe.draft import DraftRecipe
from trainer.target.features import StoredTaps, ensure_features
from trainer.target.loading import OnlineTarget, Target, load_data, load_target
from trainer.target.teacher_cache import ensure_teacher_cache
from trainer.target.vocabulary import say_coverage


def assemble_draft(recipe: DraftRecipe, device: torch.device, process: Process, begins: bool = False) -> Job:
    """Load and check everything that the recipe names, and write missing features or teacher logits.

    Every process calls this. ``begins``: see `trainer.run.train`. A run that resumes is not checked, because a busy
    machine must not stop the run.
    """
    if (start := recipe.draft.init.from_model) is not None:
        local_folder(start, weights=False)  # a misspelt name ends the run before the target is loaded
    tokenizer, dataset, heldout = load_data(recipe)
    target = load_target(recipe, device, tokenizer)
    torch.manual_seed(recipe.training.seed)  # for random initial weights
    trusted, longest = recipe.trust_remote_code, _longest(recipe, target.model)
    section, examples = recipe.draft, dataset.examples
    initial: InitialDraft | DSparkDraft
    objective: DistillObjective | DSparkObjective
    if section.dspark is not None:
        initial = initial_dspark(target.model, target.tokenizer, section, examples)
        say_coverage(process, "the draft", examples, initial.output_tokens)
        fits = begins and section.dspark.fit_tokens and section.init.from_model is None and initial.markov is not None
        if fits and (online := OnlineTarget(target.model)).transform is None:  # else a regression has a wrong scale
            process.say(
                f"the draft's bias starts as a regression on up to {section.dspark.fit_tokens:,} tokens "
                "(draft.dspark.fit_tokens)"
            )
            start_dspark(initial, online, examples, section.dspark.fit_tokens)
        layers = ", ".join(map(str, initial.config.target_layer_ids))
        mask = initial.config.mask_token_id
        name = target.tokenizer.convert_ids_to_tokens(mask) or f"token {mask}, which has no text"
        process.say(f"the draft reads the target's layers {layers}; its mask is {name}")
        if (nodes := section.dspark.tree_nodes) and recipe.evaluation.prompts:
            process.say(f"evaluations draft chains, as servers do; the finished draft uses a tree of {nodes} here")
        if (size := initial.config.head_dim) not in GPU_HEAD_DIMS:
            process.say(f"warning: the draft's attention heads are {size} wide; on GPUs vLLM and SGLang need 64 or 128")
        if (kind := rotary_of(target.model).get("rope_type", "default")) not in ("default", *SCALED):
            process.say(
                f"the draft's rotary embeddings are not scaled like the target's ({kind}), for llama.cpp's sake"
            )
    else:
        initial = initial_draft(target.model, target.tokenizer, section, examples, trusted, longest)
    identity = _identity(recipe, target, dataset, heldout, initial)
    if begins and section.check_costs:
        _check_costs(target, initial, process)
    if isinstance(initial, DSparkDraft):
        taps, seed = initial.config.target_layer_ids, recipe.training.seed
        states = OnlineTarget(target.model)
        if recipe.features is not None:
            states = StoredTaps(target.model, ensure_features(target, examples, recipe.features, process, taps))
        objective = DSparkObjective(target.model, target.tokenizer, initial, section, seed, states)
    else:
        say_coverage(process, "the draft", examples, initial.output_tokens)
        teacher = _teacher(recipe, target, dataset, process)
        objective = DistillObjective(target.model, teacher, target.tokenizer, initial, section)
    source = None
    if recipe.draft.policy.generates:
        draft = objective.writing_draft
        source = partial(policy_source, recipe, examples, target.model, target.tokenizer, draft)
    return Job(recipe, target.tokenizer, dataset, heldout, target, objective, identity, source)


def _teacher(recipe: DraftRecipe, target: Target, dataset: Dataset, process: Process) -> TeacherSource:
    section = recipe.draft.teacher
    if section is None:
        return OnlineTeacher(target.model)
    return ensure_teacher_cache(target, dataset.examples, section, recipe.draft.loss.temperature, process)


def _identity(
    recipe: DraftRecipe, target: Target, dataset: Dataset, heldout: Dataset, initial: InitialDraft | DSparkDraft
) -> dict[str, Any]:
    """Return `trainer.job.Job.identity`; a draft to start from appears as its weights' fingerprint."""
    section, content = recipe.draft, shared_identity(recipe, target, dataset, heldout)
    content["features"] = {"states": recipe.features.states if recipe.features else "target"}
    if section.init.from_model is not None:
        draft = initial.model if isinstance(initial, InitialDraft) else initial
        content["draft"]["init"]["from_model"] = fingerprint(draft)
    if isinstance(initial, DSparkDraft):
        for name in ("rope_theta", "rms_norm_eps"):  # earlier runs had the defaults under any target
            value = getattr(initial.config, name)
            content["draft"]["dspark"][name] = None if value == getattr(DSparkConfig, name) else value
        if initial.config.rope_scaling:  # earlier runs had none
            content["draft"]["dspark"]["rope_scaling"] = dict(initial.config.rope_scaling)
    if section.teacher is not None:
        content["draft"]["teacher"] = {"top_k": section.teacher.top_k, "tail": section.teacher.tail}
    return content


def _longest(recipe: DraftRecipe, target: CausalLM) -> int:
    """Return the longest text that the draft will read: prompt and answer, within the target's context."""
    policy, evaluation = recipe.draft.policy, recipe.evaluation
    answers = [policy.max_new_tokens if policy.generates else 0, evaluation.max_new_tokens if evaluation.prompts else 0]
    return min(recipe.data.max_length + max(answers), target.max_positions or 1 << 30)


def _check_costs(target: Target, initial: InitialDraft | DSparkDraft, process: Process) -> None:
    """Reject a draft that cannot pay, on every process, by costs measured on the first in the decoding dtype."""

    def measure() -> Costs:
        if isinstance(initial, DSparkDraft):
            return best_costs(target.model, DSpark(copy.deepcopy(initial).to(target.dtype).eval(), target.model))
        draft: Any = copy.deepcopy(initial.model)
        return best_costs(target.model, CausalLM(draft.to(target.dtype).eval(), initial.output_tokens))

    process.say(check_pays(from_first(measure)))


# --- the cost check ---------------------------------------------------------------------------------------------------

DEEPEST = 16
"""Longest draft that is considered."""


class Payoff(NamedTuple):
    """The largest speed-up that costs allow, and the per-position acceptance from which a draft gains.

    ``least_acceptance`` is rounded up to hundredths; it is None if no draft length gains even with all tokens accepted.
    """

    least_acceptance: float | None
    largest_speedup: float


def best_costs(target: CausalLM, draft: CausalLM | DSpark) -> Costs:
    """Measure costs; if a draft could not gain, perhaps on a busy machine, take the best of three measurements."""
    sizes = range(1, (draft.config.block_size if isinstance(draft, DSpark) else DEEPEST) + 2)
    found = measure_costs(target, sizes, draft, repeats=7)
    for _ in range(2):
        if payoff(found).least_acceptance is not None:
            break
        found = min(found, measure_costs(target, sizes, draft, repeats=7), key=lambda costs: costs.draft_step)
    return found


def payoff(costs: Costs) -> Payoff:
    """Return the gain that costs allow, over all draft lengths with a measured target pass.

    S = E / (cK + v(K+1)) (Leviathan et al., 2211.17192, theorem 3.8, with v and without overhead).
    """
    plain = costs.pass_over(1)
    chains = {depth: costs.step(depth, depth + 1) / plain for depth in range(1, max(costs.target_pass))}
    least = break_even(chains)
    largest = max((depth + 1) / cost for depth, cost in chains.items())
    return Payoff(None if least is None else math.ceil(100 * least) / 100, largest)


def check_pays(costs: Costs) -> str:
    """Describe in a sentence what a draft with these costs can gain; raise UserError if it cannot gain anything."""
    (least, most), at_once = payoff(costs), max(costs.draft)
    step = "step" if at_once == 1 else f"forward for {at_once} tokens"
    if least is None:
        raise UserError(
            f"this draft is too slow to pay: a {step} takes {costs.draft_step:.2f} of a target pass here, so even full "
            f"acceptance gives only {most:.2f} times the speed of plain decoding. Give it fewer layers (draft.init) or "
            "less width (draft.init.from_config), start again if the machine was busy, or set draft.check_costs=false"
        )
    return (
        f"costs here: a draft {step} takes {costs.draft_step:.2f} of a target pass; "
        f"it pays off above a per-position acceptance of {least:.2f}, at most {most:.1f}x"
    )

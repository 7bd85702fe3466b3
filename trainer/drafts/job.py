"""The job of a draft: from a recipe to an objective, its DSpark start, and the check that the draft can pay."""

import copy
import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from decoding.errors import UserError
from decoding.metrics import break_even
from decoding.model.causal_lm import CausalLM
from decoding.model.cost_curve import Costs, measure_costs
from decoding.model.dspark import DSpark, DSparkDraft
from decoding.model.dspark_config import GPU_HEAD_DIMS, HEAD_DIMS, DSparkConfig
from decoding.model.fingerprint import fingerprint
from decoding.model.hub import local_folder
from decoding.model.loading import eos_token_ids, load_dspark
from trainer.data.batch import Example
from trainer.data.dataset import Dataset
from trainer.drafts.distill import DistillObjective, OnlineTeacher, TeacherSource
from trainer.drafts.dspark import DSparkObjective
from trainer.drafts.on_policy import policy_source
from trainer.drafts.start import InitialDraft, initial_draft
from trainer.job import Job, shared_identity
from trainer.processes import Process, from_first
from trainer.recipe.draft import DraftRecipe, DraftSection, DSparkSection
from trainer.target.features import StoredTaps, ensure_features
from trainer.target.least_squares import fit_states, start_bias
from trainer.target.loading import OnlineTarget, Target, load_data, load_target
from trainer.target.teacher_cache import ensure_teacher_cache
from trainer.target.vocabulary import most_frequent_trained, say_coverage


def initial_dspark(
    target: CausalLM, tokenizer: PreTrainedTokenizerBase, section: DraftSection, examples: Sequence[Example]
) -> DSparkDraft:
    """Make a recipe's initial draft, in fp32 on the target's device: random by torch's global seed, or a stored one.

    Raises UserError for sizes that no server loads, and for a mask token that ends a text or occurs in the examples.
    """
    assert section.dspark is not None, "the recipe asks for a DSpark draft"
    ends = eos_token_ids(target.model, tokenizer)
    written = set[int]().union(*(np.unique(example.tokens).tolist() for example in examples))
    if section.init.from_model is None:
        config = dspark_config(target, tokenizer, section.dspark, {*ends, *written})
        config.check_fits(target)
        chosen: Sequence[int] | None = None
        if section.vocabulary is not None and section.vocabulary < target.vocab_size:
            chosen = most_frequent_trained(section.vocabulary, target.vocab_size, target, tokenizer, examples)
            config = replace(config, draft_vocab_size=len(chosen))
        draft = DSparkDraft(config).to(target.device)
        if chosen is not None:
            draft.write_only(chosen, target.model.get_output_embeddings().weight)
    else:
        draft = _stored_draft(target, tokenizer, section.init.from_model, section)
        config = draft.config
    if config.mask_token_id in {*ends, *written}:
        why = "ends a text" if config.mask_token_id in ends else "occurs in the training data"
        raise UserError(
            f"token {config.mask_token_id} would be the draft's mask, but it {why}: set draft.dspark.mask_token to a "
            "token that no text contains"
        )
    return draft


def _stored_draft(
    target: CausalLM, tokenizer: PreTrainedTokenizerBase, name: str, of_draft: DraftSection
) -> DSparkDraft:
    """Load a draft to train further; raise UserError if its sizes differ from the section's (None fits any)."""
    section = of_draft.dspark
    assert section is not None, "the recipe asks for a DSpark draft"
    draft = load_dspark(name, target).float().requires_grad_(True).train()
    if draft.lm_head is not None:
        draft.lm_head.requires_grad_(False)
    config = draft.config = replace(draft.config, tree=())  # the tree will be fitted again
    mask = None if section.mask_token is None else mask_token(tokenizer, target.vocab_size, section.mask_token)
    for key, wanted, found in (
        ("layers", section.layers, config.num_hidden_layers),
        ("block_size", section.block_size, config.block_size),
        ("taps", section.taps, config.target_layer_ids),
        ("intermediate_size", section.intermediate_size, config.intermediate_size),
        ("rope_theta", section.rope_theta, config.rope_theta),
        ("rms_norm_eps", section.rms_norm_eps, config.rms_norm_eps),
        ("markov_rank", section.markov_rank, config.markov_rank),
        ("confidence", section.confidence, config.enable_confidence_head),
        ("sample_from_anchor", section.sample_from_anchor, config.sample_from_anchor),
        ("mask_token", mask, config.mask_token_id),
    ):
        if wanted not in (None, found):
            raise UserError(
                f"draft.init.from_model, {name}, has {key} {found} and not {wanted}: change draft.dspark.{key}, or "
                "give another draft"
            )
    if of_draft.vocabulary is not None and config.outputs > min(of_draft.vocabulary, config.vocab_size):
        raise UserError(
            f"draft.init.from_model, {name}, writes {config.outputs} tokens, more than {of_draft.vocabulary}: "
            "leave draft.vocabulary out to keep them, or give another draft"
        )
    return draft


def dspark_config(
    target: CausalLM, tokenizer: PreTrainedTokenizerBase, section: DSparkSection, used: Collection[int] = ()
) -> DSparkConfig:
    """Return the sizes of a recipe's draft; the defaults are the sizes of the target's layers. ``used`` is no mask.

    Attention heads have the target's width, or the next wider one for which servers have a kernel.
    """
    config = target.model.config.get_text_config(decoder=True)
    heads = config.num_attention_heads
    head_dim = vars(config).get("head_dim") or target.hidden_size // heads
    return DSparkConfig(
        hidden_size=target.hidden_size,
        intermediate_size=section.intermediate_size
        or getattr(config, "intermediate_size", None)
        or 4 * target.hidden_size,
        num_hidden_layers=section.layers,
        num_attention_heads=heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=min((dim for dim in HEAD_DIMS if dim >= head_dim), default=head_dim),
        vocab_size=target.vocab_size,
        block_size=section.block_size,
        mask_token_id=mask_token(tokenizer, target.vocab_size, section.mask_token, used),
        target_layer_ids=section.taps or spread_taps(target.num_layers),
        num_target_layers=target.num_layers,
        markov_rank=section.markov_rank,
        enable_confidence_head=section.markov_rank > 0 if section.confidence is None else section.confidence,
        sample_from_anchor=section.sample_from_anchor,
        rope_theta=section.rope_theta or rotary_of(target).get("rope_theta") or DSparkConfig.rope_theta,
        rms_norm_eps=section.rms_norm_eps or getattr(config, "rms_norm_eps", None) or DSparkConfig.rms_norm_eps,
        max_position_embeddings=target.max_positions or 1 << 20,
    )


def rotary_of(target: CausalLM) -> dict[str, Any]:
    """Return the rotary parameters of the target's layers that attend to the whole text; empty if there are none."""
    given = getattr(target.model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    found: dict[str, Any] = given.get("full_attention", given)
    return found


def spread_taps(layers: int) -> tuple[int, ...]:
    """Return three evenly spaced layers, five if ``layers`` is at least 24, from the second to the last but one."""
    count, highest = (5 if layers >= 24 else 3), layers - 2
    lowest = min(1, highest)
    return tuple(sorted({lowest + index * (highest - lowest) // (count - 1) for index in range(count)}))


def mask_token(
    tokenizer: PreTrainedTokenizerBase, vocab_size: int, name: str | None = None, used: Collection[int] = ()
) -> int:
    """Return the id of a token that no text contains: neither one of ``used`` nor in the chat template.

    By default the padding or another special token, an id without a token, or a byte that never occurs in UTF-8. Raises
    UserError if ``name`` is not a token of the target, and if no token is free.
    """
    known = tokenizer.get_vocab()
    if name is not None:
        if known.get(name, vocab_size) >= vocab_size:
            raise UserError(f"draft.dspark.mask_token, {name!r}, is not a token of the target: give an existing token")
        return int(known[name])
    used = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id, *used}
    added: dict[int, Any] = tokenizer.added_tokens_decoder
    special = [index for index, token in added.items() if token.special]
    special.sort(key=lambda index: (index != tokenizer.pad_token_id, index))
    template = str(tokenizer.chat_template or "")
    candidates = [index for index in special if added[index].content not in template]
    candidates.append(max(known.values(), default=-1) + 1)
    for byte in ("<0xFF>", "ÿ"):  # the byte 255 in the alphabets of sentencepiece and GPT-2
        if byte in known and known[byte] not in tokenizer(byte, add_special_tokens=False)["input_ids"]:
            candidates.append(known[byte])
    if free := [index for index in candidates if index < vocab_size and index not in used]:
        return free[0]
    raise UserError(
        "the target's tokenizer has no spare token for the mask: set draft.dspark.mask_token to one that your data "
        "never contains"
    )


_QUIET = 0.3
"""First weights of the last norm of a draft whose bias is fitted: logits of untrained layers would drown the bias."""


@torch.no_grad()
def start_dspark(draft: DSparkDraft, states: OnlineTarget, examples: Sequence[Example], most: int) -> None:
    """Start a new draft's bias as `fit_states` fits it on ``most`` tokens of the examples. Every process calls this."""
    assert draft.markov is not None, "only a bias is fitted"
    lm_head = states.lm_head if draft.lm_head is None else draft.lm_head.weight
    rank = draft.config.markov_rank
    start_bias(draft.markov, from_first(lambda: fit_states(states, examples, 0, most).start(rank)), lm_head)
    draft.norm.weight.fill_(_QUIET)


def assemble_draft(recipe: DraftRecipe, device: torch.device, process: Process, begins: bool = False) -> Job:
    """Load and check everything that the recipe names, and write missing features or teacher logits.

    Every process calls this. ``begins``: see `trainer.run.train`. A run that resumes is not checked, because a busy
    machine must not stop it.
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
        if fits and (online := OnlineTarget(target.model)).transform is None:  # else a regression is off by a scale
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
        if (kind := rotary_of(target.model).get("rope_type", "default")) != "default":
            process.say(
                f"warning: the target scales its rotary embeddings ({kind}), but DSpark drafts cannot do so here: "
                "fewer drafted tokens may be accepted in long texts"
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

    ``least_acceptance`` is rounded up to hundredths; None if no draft length gains even if all tokens are accepted.
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
    """Describe in a sentence what a draft of these costs can gain; raise UserError if nothing."""
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

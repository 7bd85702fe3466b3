"""`headstart plan`: measures costs on this machine and chooses what to draft, or predicts what a draft would gain."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn
from transformers import PreTrainedTokenizerBase

from decoding.drafters import Drafter
from decoding.drafters.registry import DrafterLoader, named_drafter
from decoding.drafters.spec import all_paths
from decoding.dtypes import parse_dtype
from decoding.errors import UserError
from decoding.files.fingerprint import prompts_fingerprint, tokenizer_fingerprint
from decoding.files.hub import revisions
from decoding.measure.planning.plan_file import plan_fingerprints, read_plan, write_plan
from decoding.measure.planning.planner import PlanConfig, Planner
from decoding.measure.planning.prospects import DEEPEST, Prospects
from decoding.measure.planning.step_costs import LEAST_GAIN
from decoding.measure.planning.views import NAMES, advice, basis, break_even_table, plan_table, published_table
from decoding.measure.questions import read_prompts
from decoding.measure.results import as_json
from decoding.model.causal_lm import CausalLM
from decoding.model.dspark_draft import DSparkDraft
from decoding.model.heads import MedusaConfig, MedusaHeads
from decoding.model.loading import eos_token_ids
from trainer.commands.findings import account
from trainer.commands.models import read_specs, read_target, read_tokenizer
from trainer.commands.options import PlanOptions
from trainer.commands.shared_options import ModelOptions
from trainer.drafts.distill import drafter_of
from trainer.drafts.dspark_start import dspark_config
from trainer.drafts.start import draft_from_target
from trainer.recipe.draft import DSparkSection
from trainer.terminal.console import ProgressBar, say, standard_error, standard_output, wide


def run_plan(options: PlanOptions, console: Console | None = None) -> dict[str, Any]:
    """Measure, print the tables, write plan.json and return the plan.

    Without drafters the plan predicts gains and chooses nothing.
    """
    watched, console = console or standard_error(), console or standard_output()
    specs = read_specs(options.drafter or ())
    tokenizer = read_tokenizer(options.target, options)
    read = read_prompts(options.prompts, tokenizer, options.limit, options.prompt_field)
    target = read_target(options.target, options)
    config = PlanConfig(
        batch_sizes=tuple(options.batch_size),
        temperature=options.temperature,
        max_new_tokens=options.max_new_tokens,
        eos_token_ids=eos_token_ids(target.model, tokenizer),
    )
    about: dict[str, Any] = {}
    planner: Planner | Prospects
    if specs:
        loader = DrafterLoader(target, tokenizer, options.trust_remote_code)
        planner = Planner(target, loader.load, specs, read, config)
    else:
        drafters, about["parameters"], about["left_out"] = untrained_drafters(target, tokenizer)
        planner = Prospects(target, drafters, read, config)
    fingerprints = {
        **plan_fingerprints(options.target, specs, options.trust_remote_code),
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "prompts": prompts_fingerprint(planner.prompts),
    }
    about |= {
        **account(),
        "fingerprints": fingerprints,
        "revisions": revisions({"target": options.target, **all_paths({str(spec): spec for spec in specs})}),
        "dtype": str(target.dtype).removeprefix("torch."),
        "static": target.shapes,
        "target_parameters": sum(parameter.numel() for parameter in target.model.parameters()),
        "prompts_left_out": len(read) - len(planner.prompts),
    }
    with ProgressBar(watched, "planning", planner.steps) as bar:
        planner.advance = bar.advance
        plan: dict[str, Any] = as_json({**about, **planner.run()})
    write_plan(plan, options.output / "plan.json")
    if specs:
        wide(console).print(plan_table(plan))
        say(console, basis(plan))
    else:
        wide(console).print(break_even_table(plan), published_table(plan))
        say(wide(console), *advice(plan), *(f"{NAMES[k]} left out: {why}" for k, why in plan["left_out"].items()))
    if plan["prompts_left_out"]:
        say(console, f"{plan['prompts_left_out']} prompts are too long for the target or a drafter and were left out")
    say(console, f"written: {options.output / 'plan.json'}")
    return plan


# --- untrained drafters, whose costs are measured if no drafter is given ----------------------------------------------


def untrained_drafters(
    target: CausalLM, tokenizer: PreTrainedTokenizerBase
) -> tuple[dict[str, Drafter], dict[str, int], dict[str, str]]:
    """Return three mappings by kind: chain drafters, the number of parameters of each drafter, and the reason why a
    kind is missing.

    Heads share the target's lm_head. The DSpark draft has as many layers as in the recipes, and the small draft
    consists of one layer of the target.
    """

    def heads() -> tuple[Drafter, int]:
        chain = tuple((0,) * depth for depth in range(1, DEEPEST + 1))
        config = MedusaConfig(target.hidden_size, target.vocab_size, DEEPEST, tree=chain, shared_lm_head=True)
        made = MedusaHeads.for_target(target.model, config).to(target.device, target.dtype).eval()
        return named_drafter("heads", made), _parameters(made)

    def dspark() -> tuple[Drafter, int]:
        anything = str(tokenizer.convert_ids_to_tokens(0))  # the costs do not depend on this token
        config = dspark_config(target, tokenizer, DSparkSection(block_size=DEEPEST, mask_token=anything))
        config.check_fits(target)
        with target.device:  # a CPU would need many seconds for the random weights of an 8B target's draft
            made = DSparkDraft(config).to(target.dtype).eval()
        return drafter_of(made, DEEPEST), _parameters(made)

    def draft() -> tuple[Drafter, int]:
        made = draft_from_target(target.model, 1).to(target.device).eval()  # type: ignore[arg-type]
        return drafter_of(CausalLM(made), DEEPEST), _parameters(made)

    makers: dict[str, Callable[[], tuple[Drafter, int]]] = {"heads": heads, "dspark": dspark, "draft": draft}
    drafters, parameters, left_out = {}, {}, {}
    for kind, make in makers.items():
        try:
            drafters[kind], parameters[kind] = make()
        except UserError as error:  # this target cannot have such a draft
            left_out[kind] = str(error)
    return drafters, parameters, left_out


def _parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


# --- a plan for another command ---------------------------------------------------------------------------------------


def asked_or_planned(
    given: Sequence[str],
    path: Path | None,
    options: ModelOptions,
    temperatures: Sequence[float],
    batch_sizes: Sequence[int],
    notes: Console,
) -> Sequence[str]:
    """Return the specs of the ``given`` drafters, or of the drafters that the plan in ``path`` chose; the result is
    empty for plain decoding.

    ``temperatures`` and ``batch_sizes`` describe the texts that will be decoded. Prints to ``notes`` why the plan may
    suit these texts badly. Raises UserError if both drafters and a plan are set, or if the plan has another target,
    drafter or dtype.
    """
    if path is None:
        return given
    if given:
        raise UserError("both --plan and --drafter are set: omit one")
    plan = read_plan(path)
    dtype = str(parse_dtype(options.dtype)).removeprefix("torch.")
    remarks = plan.check(options.target, dtype, options.trust_remote_code)
    if other := [f"{temperature:g}" for temperature in temperatures if temperature != plan.content["temperature"]]:
        remarks.append(f"{path} was made at temperature {plan.content['temperature']:g}, not {', '.join(other)}")
    choices = {size: plan.choice(size) for size in batch_sizes}
    if unplanned := [str(size) for size in batch_sizes if size not in plan.batch_sizes]:
        known = ", ".join(map(str, plan.batch_sizes))
        remarks.append(f"{path} has batch sizes {known}; batch size {', '.join(unplanned)} uses the nearest of these")
    if slow := [str(size) for size, choice in choices.items() if choice is None]:
        gain = f"{LEAST_GAIN - 1:.0%} over plain decoding at batch size {', '.join(slow)}"
        remarks.append(f"{path} found no drafter that gains {gain}")
    say(notes, *(f"note: {note}" for note in remarks))
    return list(dict.fromkeys(choice["spec"] for choice in choices.values() if choice is not None))

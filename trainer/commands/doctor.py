"""The command `headstart doctor`: checks the machine, installed packages, target and drafters."""

import os
import shlex
from collections.abc import Sequence

import torch
from rich.console import Console

from decoding.dtypes import parse_dtype
from decoding.measure.proof.finding import Finding, all_pass
from trainer.commands.check_options import DoctorOptions
from trainer.commands.findings import PRINTED, report, say_findings, summary, write_findings
from trainer.doctor.machine import free_bytes, installed_packages, machine_findings
from trainer.terminal.console import say, standard_error, standard_output

OF_ANY: Sequence[str] = ("medusa1", "draft")
"""Recipes in recipes/any for a target that can verify trees."""


def run_doctor(options: DoctorOptions, console: Console | None = None) -> bool:
    """Run all checks and print their findings; return False if there is a problem. Raises UserError for a dtype, a
    drafter or a target that does not exist.

    transformers takes longest to import, so it is imported only if there is a target to check.
    """
    console = console or standard_output()
    parse_dtype(options.dtype)
    recipes = OF_ANY
    sections = {"machine": machine_findings(os.environ), "packages": installed_packages()}
    if options.drafter and options.target is None:
        from trainer.commands.models import read_specs
        from trainer.doctor import models

        sections |= {f"drafter {spec}": models.layout_findings(spec) for spec in read_specs(options.drafter)}
    if options.target is not None:
        say(standard_error(), f"reading {options.target} …", style="dim")
        of_models, recipes = _models(options, options.target)
        sections |= of_models
    fits = all_pass([finding for findings in sections.values() for finding in findings])
    commands = next_commands(options.target, tuple(options.drafter or ()), fits, recipes)
    if options.json is not None:
        write_findings(options.json, report(sections, next=commands))
    if options.json != PRINTED:
        for title, findings in sections.items():
            say(console, title, style="bold")
            say_findings(console, findings)
        say(console, "next", style="bold")
        say(console, *(f"  {command}" for command in commands))
        say(console, summary([finding for findings in sections.values() for finding in findings]))
    return fits


def _models(options: DoctorOptions, name: str) -> tuple[dict[str, list[Finding]], Sequence[str]]:
    """Return the findings on the target and each drafter, by title, and the recipes that can train drafters for the
    target.
    """
    from decoding.drafters.spec import DrafterSpec
    from trainer.commands.models import read_specs
    from trainer.doctor import models

    specs = read_specs(options.drafter or ())
    further = [DrafterSpec("draft", path, {}) for spec in specs for option, path in spec.paths.items() if option]
    specs = [*specs, *(spec for spec in further if spec not in specs)]
    dtype, trusted = parse_dtype(options.dtype), options.trust_remote_code
    findings, target = models.read_skeleton(name, dtype, trusted)
    sections = {f"target {name}": findings}
    if target is None:
        return sections, OF_ANY
    checks = {f"drafter {spec}": models.check_drafter(spec, target, trusted) for spec in specs}
    weights = {"target": target.bytes, **{title: check.weights for title, check in checks.items() if check.weights}}
    free = free_bytes()
    findings += [*models.target_findings(target), models.check_memory(weights, free)]
    sections |= {title: check.findings for title, check in checks.items()}
    small = models.is_small(weights, target.model.dtype.itemsize, free)
    here = any(target.folder.glob("*.safetensors"))
    decode = options.decode if options.decode is not None else small and here
    if decode and all_pass([finding for findings in sections.values() for finding in findings]):
        decoded = models.check_decoding(target.name, torch.float32 if small else dtype, specs, trusted)
        for section, finding in zip(sections.values(), decoded, strict=False):  # the findings end at the first problem
            section.append(finding)
    return sections, models.fitting_recipes(target.model)


def next_commands(
    target: str | None, drafters: Sequence[str], fits: bool, recipes: Sequence[str] = OF_ANY
) -> list[str]:
    """Return the commands to run next, in order: check again, or train, or measure and plan.

    ``recipes``: names in recipes/any that can train drafters for the target; empty if the target cannot verify drafts.
    """
    if target is None:
        return ["headstart train recipes/quickstart/medusa1.yaml", "headstart doctor --target ORG/NAME"]
    given = [word for name in drafters for word in ("--drafter", name)]
    if not fits:
        return [shlex.join(["headstart", "doctor", "--target", target, *given])]
    if not recipes:
        return [shlex.join(["headstart", "generate", "--target", target, "--prompt", "Once upon a time"])]
    measured = ["--target", target, *given, "--prompts", "heldout.jsonl", "--output"]
    if given:
        return [
            shlex.join(["headstart", "evaluate", *measured, "runs/measured"]),
            shlex.join(["headstart", "plan", *measured, "runs/plan"]),
        ]
    own = [f"target={target}", "data.train=answers.jsonl", "data.heldout=heldout.jsonl"]
    write = ["headstart", "regenerate", "--target", target, "--prompts", "prompts.jsonl", "--output"]
    trained = [[*write, "answers.jsonl"]]
    for kind in recipes:
        run = [f"name={kind}", f"output=runs/{kind}"]
        trained.append(["headstart", "train", f"recipes/any/{kind}.yaml", *own, *run])
    lookup = ["headstart", "evaluate", "--target", target, "--drafter", "lookup", "--prompts", "heldout.jsonl"]
    return [shlex.join([*lookup, "--output", "runs/lookup"]), *map(shlex.join, trained)]

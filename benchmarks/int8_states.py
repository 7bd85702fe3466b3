"""Medusa-1 heads from features in the target's dtype and in int8: the same rows, steps and seeds, decoded side by side.

The last rows of the answers are not trained: their prompts are decoded, greedily and at temperature 1, by a chain of
the heads. Tokens per target pass, and the ratio of the two over the same prompts with its 95% interval by resampling.

    python benchmarks/int8_states.py --target FOLDER --answers FILE --output FILE.json
"""

# ruff: noqa: E402  # the path comes first
import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent
sys.path = [str(_HERE.parent), *(entry for entry in sys.path if Path(entry).resolve() != _HERE)]

from decoding.threads import spin_briefly

spin_briefly()  # before torch is imported

import torch

from decoding.drafters.registry import named_drafter
from decoding.engine import Engine
from decoding.generate import DecodingConfig
from decoding.measure.machine import commit, hardware, versions
from decoding.metrics import ratio_of_rates
from decoding.model.causal_lm import CausalLM
from decoding.model.heads import MedusaHeads
from decoding.model.loading import load_model, load_tokenizer
from decoding.prompts import encode_prompt
from decoding.rules.sampling import SamplingConfig
from trainer import load_recipe, run_recipe

STATES = ("target", "int8")
RECIPE = _HERE.parent / "recipes" / "storyteller-11m" / "medusa1.yaml"


def trained(options: argparse.Namespace, rows: Path, states: str, seed: int, folder: Path) -> MedusaHeads:
    """Train heads from features of these states; nothing is evaluated on the way, so the heads keep a chain."""
    changes = {
        "target": options.target,
        "data.train": rows,
        "data.heldout": rows,
        "output": folder / f"{states}-{seed}",
        "features.folder": folder / states,
        "features.states": states,
        "training.steps": options.steps,
        "training.seed": seed,
        "evaluation.prompts": 0,
        "checkpoint.every": options.steps,
    }
    final = run_recipe(load_recipe(str(RECIPE), [f"{key}={value}" for key, value in changes.items()]))
    return MedusaHeads.from_pretrained(final, torch.bfloat16)


def counts(engine: Engine, prompts: list[tuple[int, ...]], temperature: float, tokens: int) -> torch.Tensor:
    """Return tokens and target passes of each prompt, (prompts, 2)."""
    found = torch.zeros(len(prompts), 2)
    config = DecodingConfig(tokens, SamplingConfig(temperature=temperature), seed=1)
    for place, step in engine.steps(prompts, config, batch_size=16):
        found[place] += torch.tensor([len(step.tokens), 1.0])
    return found


def ratio(ours: torch.Tensor, theirs: torch.Tensor) -> dict[str, float]:
    """Compare tokens per pass over the same prompts."""
    each = [float(found.sum(0)[0] / found.sum(0)[1]) for found in (ours, theirs)]
    compared = ratio_of_rates([tuple(row) for row in torch.cat((ours, theirs), 1).tolist()])
    return {"int8": each[0], "target": each[1], "ratio": compared.value, "low": compared.low, "high": compared.high}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--answers", type=Path, required=True, help="rows of the target's own answers")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=128, help="last rows, decoded and not trained")
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--max-new-tokens", type=int, default=64)
    options = parser.parse_args()
    lines = options.answers.read_text().splitlines()
    target, tokenizer = CausalLM(load_model(options.target, torch.bfloat16)), load_tokenizer(options.target)
    asked = [json.loads(line)["messages"][:1] for line in lines[-options.prompts :]]
    prompts = [tuple(encode_prompt(turns, tokenizer, True)) for turns in asked]
    report: dict[str, Any] = {"hardware": hardware(), "versions": versions(), "commit": commit(), "seeds": []}
    with tempfile.TemporaryDirectory() as scratch:
        rows = Path(scratch) / "rows.jsonl"
        rows.write_text("\n".join(lines[: -options.prompts]) + "\n")
        for seed in options.seeds:
            heads = {states: trained(options, rows, states, seed, Path(scratch)) for states in STATES}
            engines = {states: Engine(target, named_drafter("heads", heads[states])) for states in STATES}
            for temperature in (0.0, 1.0):
                found = [counts(engines[s], prompts, temperature, options.max_new_tokens) for s in ("int8", "target")]
                report["seeds"].append({"seed": seed, "temperature": temperature, **ratio(*found)})
                print(report["seeds"][-1], flush=True)
        report["bytes"] = {s: sum(f.stat().st_size for f in (Path(scratch) / s).glob("shard*")) for s in STATES}
    report["settings"] = {"steps": options.steps, "prompts": len(prompts), "new tokens": options.max_new_tokens}
    options.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

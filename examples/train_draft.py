"""Distil a small draft from a target, decode with it, and find how many tokens it should draft.

    python examples/train_draft.py
    python examples/train_draft.py target=ORG/NAME data.train=answers.jsonl data.heldout=test.jsonl training.steps=1000

Words behind the program change the recipe, as behind `headstart train`. A run that was stopped goes on.
"""

import sys
from pathlib import Path

import torch

from decoding import HeadstartModel, speculate
from decoding.model.loading import load_tokenizer
from decoding.speculation import SpeculativeOutput
from decoding.tally import Tally
from trainer import load_recipe, prepare_target, run_recipe

RECIPE = Path(__file__).parent.parent / "recipes" / "quickstart" / "draft.yaml"
PROMPTS = ["import os\nimport sys\n\n", "class Stack:\n    def __init__(self):\n", "def main():\n    parser = "]

# 1. The draft starts as the target's first layer, and learns the target's distribution on the target's own answers.
recipe = load_recipe(RECIPE, sys.argv[1:])
draft = run_recipe(recipe)
print(f"the draft is in {draft}: a model like any other, which transformers can load too")

# 2. One more drafted token saves a pass where it is kept, and costs a pass of the draft where it is not: measure it.
target = prepare_target(recipe.target)
tokenizer = load_tokenizer(target)
prompts = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]


def timed(model: HeadstartModel) -> tuple[SpeculativeOutput, float]:
    """Decode the prompts twice, the first time to warm up; return the texts and the seconds without the prefills."""
    for _ in range(2):
        output = speculate(
            model.target,
            model.drafter,
            prompts,
            max_new_tokens=64,
            batch_size=1,
            pad_token_id=tokenizer.eos_token_id,
        )
    return output, sum(Tally.of(text.steps).total_seconds for text in output.generations)


# In fp32 greedy texts are equal to the token; in bf16, the default and faster, near-ties may turn out differently.
plain = HeadstartModel.from_pretrained(target, dtype=torch.float32)
wanted, plain_seconds = timed(plain)
print(f"plain decoding: {plain_seconds:.2f} s")
for tokens in (2, 4, 6):
    drafting = HeadstartModel.from_pretrained(plain.target.model, f"draft:{draft},tokens={tokens}", tokenizer=tokenizer)
    found, seconds = timed(drafting)
    same = "the same texts" if torch.equal(found.sequences, wanted.sequences) else "OTHER TEXTS"
    print(
        f"{tokens} drafted tokens: {same}, {found.tokens_per_pass:.2f} tokens per pass, {seconds:.2f} s, "
        f"{plain_seconds / seconds:.2f}x"
    )

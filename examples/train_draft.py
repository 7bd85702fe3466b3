"""Distil a small draft from a target, decode with it, and find how many tokens it should draft.

    python examples/train_draft.py
    python examples/train_draft.py target=ORG/NAME data.train=answers.jsonl data.heldout=test.jsonl training.steps=1000

Arguments change the recipe, as in `headstart train`. A stopped run is resumed.
"""

import statistics
import sys
from pathlib import Path

import torch

from decoding import HeadstartModel, speculate
from decoding.model.loading import load_tokenizer
from decoding.prompts import encode_prompt
from decoding.speculation import SpeculativeOutput
from decoding.text import Tally
from trainer import load_recipe, run_recipe

RECIPE = Path(__file__).parent.parent / "recipes" / "quickstart" / "draft.yaml"
PROMPTS = ["Why is the sky blue?", "Write a short poem about rain.", "How do I cook rice?"]

# 1. The draft starts as the target's first layer and learns the target's distribution on answers by the target.
recipe = load_recipe(RECIPE, sys.argv[1:])
draft = run_recipe(recipe)
print(f"the draft is in {draft}: a model like any other, which transformers can also load")

# 2. Each further drafted token costs a pass of the draft and saves a target pass if it is kept. Measure which number is
# fastest.
tokenizer = load_tokenizer(recipe.target)
prompts = [encode_prompt(prompt, tokenizer, chat=True) for prompt in PROMPTS]

# In fp32 plain decoding writes the same greedy texts. The default, bf16, is faster, but the texts may differ after a
# token that was almost as likely as another token.
plain = HeadstartModel.from_pretrained(recipe.target, dtype=torch.float32)
models = {"plain decoding": plain}
for tokens in (2, 4, 6):
    models[f"{tokens} drafted tokens"] = HeadstartModel.from_pretrained(
        plain.target.model, f"draft:{draft},tokens={tokens}", tokenizer=tokenizer
    )
outputs: dict[str, SpeculativeOutput] = {}
seconds: dict[str, list[float]] = {name: [] for name in models}
for turn in range(4):  # the models alternate, so a busy machine slows all of them alike; the first turn is a warm-up
    for name, model in models.items():
        outputs[name] = speculate(
            model.target,
            model.drafter,
            prompts,
            max_new_tokens=64,
            batch_size=1,
            policy="fixed",
            pad_token_id=tokenizer.eos_token_id,
        )
        took = sum(Tally.of(text.steps).total_seconds for text in outputs[name].generations)
        seconds[name] += [took] * (turn > 0)
for name, output in outputs.items():
    same = torch.equal(output.sequences, outputs["plain decoding"].sequences)
    speed = statistics.median(seconds["plain decoding"]) / statistics.median(seconds[name])
    print(
        f"{name}: {'the same texts' if same else 'OTHER TEXTS'}, {output.tokens_per_pass:.2f} tokens per target pass, "
        f"{speed:.2f} times the speed"
    )

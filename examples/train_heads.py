"""Train Medusa heads on a target, then decode with them.

    python examples/train_heads.py
    python examples/train_heads.py target=ORG/NAME data.train=answers.jsonl data.heldout=test.jsonl training.steps=1000

Arguments change the recipe, as in `headstart train`. A stopped run is resumed.
"""

import sys
from pathlib import Path

import torch

from decoding import HeadstartModel, speculate
from decoding.model.loading import load_tokenizer
from decoding.prompts import encode_prompt
from trainer import load_recipe, run_recipe

RECIPE = Path(__file__).parent.parent / "recipes" / "quickstart" / "medusa1.yaml"
PROMPTS = ["Why is the sky blue?", "Write a short poem about rain.", "How do I cook rice?"]

# 1. The recipe: typed settings from YAML, with overrides. A misspelt key raises an error that suggests the right one.
recipe = load_recipe(RECIPE, sys.argv[1:])
print(f"{recipe.training.steps} steps on {recipe.target}: {recipe.data.train}")

# 2. The run: the heads learn from answers that the target wrote.
heads = run_recipe(recipe)
print(f"the heads are in {heads}")

# 3. In each step the heads propose a tree, and the target keeps the tokens that it would have written itself. In fp32
#    plain decoding writes the same tokens. The default, bf16, is faster, but the texts of the two may differ after a
#    token that was almost as likely as another token.
tokenizer = load_tokenizer(recipe.target)
model = HeadstartModel.from_pretrained(recipe.target, f"heads:{heads}", dtype=torch.float32)
prompts = [encode_prompt(prompt, tokenizer, chat=True) for prompt in PROMPTS]
texts = {"max_new_tokens": 64, "batch_size": 1, "policy": "fixed", "pad_token_id": tokenizer.eos_token_id}
plain = speculate(model.target, None, prompts, **texts)
drafted = speculate(model.target, model.drafter, prompts, **texts)
print(f"{drafted.tokens_per_pass:.2f} tokens per target pass; plain decoding writes {plain.tokens_per_pass:.2f}")
print(f"the same texts: {torch.equal(plain.sequences, drafted.sequences)}")
for position, share in enumerate(drafted.acceptance.unconditional, start=1):
    print(f"head {position}: its token was kept in {share.value:.0%} of {share.observations} passes")

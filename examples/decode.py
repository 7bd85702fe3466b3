"""Decode with a drafter: one call, a stream in two colours, and a batch with its figures.

python examples/decode.py
python examples/decode.py --target ORG/NAME --drafter heads:runs/heads/final --prompt "def quicksort("
"""

import argparse

import torch
from rich.console import Console

from decoding import DecodingConfig, Engine, HeadstartModel, speculate
from decoding.model.loading import eos_token_ids, load_tokenizer
from decoding.text import Tally, stream_pieces

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--target", default="quickstart", help="folder, GGUF file or hub id")
parser.add_argument("--drafter", default="lookup", help="drafter, as in docs/reference/commands.md")
parser.add_argument("--prompt", default="class Stack:\n    def __init__(self):\n        self.items = []\n")
parser.add_argument("--max-new-tokens", type=int, default=64)
options = parser.parse_args()

tokenizer = load_tokenizer(options.target)
# In fp32 plain decoding writes the same greedy text. The default, bf16, is faster, but the texts of the two may differ
# after a token that was almost as likely as another token.
model = HeadstartModel.from_pretrained(options.target, options.drafter, dtype=torch.float32)

# 1. One call instead of `generate` of transformers, with the same options and the same result.
inputs = tokenizer(options.prompt, return_tensors="pt").to(model.device)
lengths = {"max_new_tokens": options.max_new_tokens, "do_sample": False}
written = model.generate(**inputs, **lengths)
same = torch.equal(written, model.target.model.generate(**inputs, **lengths))
print(f"the text of transformers' generate: {'equal' if same else 'DIFFERENT'}")

# 2. A stream: each step of the loop is one target pass. Drafted tokens are green, and tokens by the target are plain.
console = Console(highlight=False)
config = DecodingConfig(options.max_new_tokens, eos_token_ids=eos_token_ids(model.target.model, tokenizer))
tally = Tally()  # running figures, up to date at every piece
steps = Engine(model.target, model.drafter).steps(inputs["input_ids"][0].tolist(), config)
console.print(options.prompt, style="dim", end="", markup=False)
for piece in stream_pieces(tally.watch(steps), tokenizer, hidden=config.eos_token_ids):
    console.print(piece.text, style="green" if piece.drafted else None, end="", markup=False)
print(f"\n{tally.tokens_per_pass:.2f} tokens per target pass, {tally.tokens_per_second:.0f} tokens/s")

# 3. A sampled batch: rows accept different numbers of tokens and have different seeds.
prompts = [tokenizer(text)["input_ids"] for text in ("import os\n", "def main():\n", "for key, value in ")]
output = speculate(
    model.target,
    model.drafter,
    prompts,
    temperature=0.8,
    max_new_tokens=options.max_new_tokens,
    pad_token_id=tokenizer.eos_token_id,
)
figures = output.acceptance
print(f"a batch of {len(prompts)}, {output.label}: {output.tokens_per_pass:.2f} tokens per target pass")
print(f"passes by the number of drafted tokens that they kept: {figures.length_histogram}")
for position, share in enumerate(figures.conditional[:4], start=1):
    print(f"per-position acceptance {position}: {share.value:.0%} of {share.observations} drafted tokens")

"""Your own drafter in 40 lines: n-grams of your texts and of the text that is being decoded.

    python examples/own_drafter.py
    python examples/own_drafter.py --target ORG/NAME --corpus manual.txt --prompt "To reset the device, "

Such a drafter is useful if answers repeat a known text (code, a manual, a form) or earlier parts of themselves, and it
needs neither a model nor training. The target checks every token, so a bad drafter costs time but never changes the
text.
"""

import argparse
import sysconfig
from collections import ChainMap
from collections.abc import MutableMapping, Sequence
from pathlib import Path

import torch

from decoding import HeadstartModel, SamplingConfig, speculate
from decoding.drafters.base import DraftRequest, TextDrafter, TextStart, chain_budgets
from decoding.model.causal_lm import CausalLM
from decoding.model.loading import load_tokenizer
from decoding.rules.tree import Proposal, ProposalKind, TokenTree


# --- the drafter ------------------------------------------------------------------------------------------------------
def learn(followers: MutableMapping[tuple[int, ...], int], tokens: Sequence[int], begin: int, longest: int) -> None:
    """Record the token that follows each n-gram, from position ``begin`` on; later tokens replace earlier ones."""
    for place in range(begin, len(tokens)):
        for size in range(1, min(longest, place) + 1):
            followers[tuple(tokens[place - size : place])] = tokens[place]


class NgramDrafter(TextDrafter):
    name = "n-grams"

    def __init__(self, corpus: Sequence[int], longest: int = 4, depth: int = 6) -> None:
        self.longest = longest
        self.budgets = chain_budgets(depth)  # sizes of drafts from which a policy may choose
        self.followers: dict[tuple[int, ...], int] = {}
        learn(self.followers, corpus, 1, longest)

    def open_text(self, target: CausalLM, sampling: SamplingConfig, start: TextStart, max_length: int) -> "NgramText":
        return NgramText(self, target.device)


class NgramText:
    """One text being decoded. The n-grams of this text take precedence over the n-grams of the corpus."""

    def __init__(self, drafter: NgramDrafter, device: torch.device) -> None:
        self.longest, self.device, self.seen = drafter.longest, device, 1
        self.followers = ChainMap({}, drafter.followers)  # writes go to the first map

    def propose(self, request: DraftRequest) -> Proposal:
        learn(self.followers, request.tokens, self.seen, self.longest)
        self.seen = len(request.tokens)
        text, drafted = list(request.tokens[-self.longest :]), [request.tokens[-1]]  # the root is not drafted
        while len(drafted) <= request.max_depth:
            endings = (tuple(text[-size:]) for size in range(self.longest, 0, -1))
            token = next((self.followers[ending] for ending in endings if ending in self.followers), None)
            if token is None:
                break
            text.append(token)
            drafted.append(token)
        # The draft depends only on the text, so it is deterministic, and rules for this kind stay lossless.
        return Proposal(TokenTree.chain(drafted, self.device), ProposalKind.DETERMINISTIC)


# --- its use ----------------------------------------------------------------------------------------------------------
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--target", default="quickstart", help="folder, GGUF file or hub id")
parser.add_argument(
    "--corpus", type=Path, nargs="+", help="texts for the n-grams; by default files of Python's standard library"
)
parser.add_argument("--prompt", default="class Stack:\n    def __init__(self):\n        self.items = []\n")
parser.add_argument("--max-new-tokens", type=int, default=64)
options = parser.parse_args()

tokenizer = load_tokenizer(options.target)
corpus = options.corpus or sorted(Path(sysconfig.get_path("stdlib")).glob("[a-h]*.py"))
tokens = [token for path in corpus for token in tokenizer(path.read_text(encoding="utf-8"))["input_ids"]]
drafter = NgramDrafter(tokens)
print(f"{len(drafter.followers):,} n-grams of {len(tokens):,} tokens")

model = HeadstartModel.from_pretrained(options.target, dtype=torch.float32)
prompt = [tokenizer(options.prompt)["input_ids"]]
for temperature in (0.0, 1.0):
    # Above temperature 0 the rule draws from the target like plain decoding, so the same seed leads to the same text.
    texts = {"temperature": temperature, "max_new_tokens": options.max_new_tokens, "policy": "fixed"}
    plain = speculate(model.target, None, prompt, **texts)
    drafted = speculate(model.target, drafter, prompt, **texts)
    same = torch.equal(plain.sequences, drafted.sequences)
    kept = drafted.acceptance.accepted_per_drafted
    print(
        f"T={temperature:g}, {drafted.label}: {'the same text' if same else 'ANOTHER TEXT'}, "
        f"{drafted.tokens_per_pass:.2f} tokens per target pass, "
        f"{kept.value:.0%} of {kept.observations} drafted tokens kept"
    )

"""One check for every device and dtype: trees over a cache whose keys serve four queries each, compared with plain
attention. The head size is 128, as in large models, and the number of keys is odd, so that masks are not aligned. The
fast tests run this check on the CPU, which shows that the check itself is right before a GPU runs it.
"""

import copy
from typing import Any

import torch
from tiny_models import tiny_model
from torch import Tensor

from decoding.model.causal_lm import CausalLM
from decoding.rules.tree import TokenTree, TreeShape

PREFIXES = ([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3, 3, 8, 3, 2], [2, 7, 1, 8, 2])
TREE = TreeShape((-1, 0, 0, 1, 1, 2))
TOKENS = (9, 2, 6, 5, 3, 8)
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.06, torch.float16: 0.01}
"""Tolerance relative to the largest logit: three times the rounding error on a CPU."""


def check_grouped_queries(device: str, dtype: torch.dtype) -> None:
    """Check rows of different and of equal lengths; the second pass reads keys that the commit of the first pass
    moved.
    """
    torch.manual_seed(0)
    changes: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128}
    changes |= {"initializer_range": 0.2}  # scores are not so far apart that rounding would choose between keys
    model = tiny_model("llama", seed=2, attention="sdpa", **changes).to(device, dtype)  # type: ignore[call-overload]
    plain = tiny_model("llama", seed=2, attention="eager", **changes)
    plain.load_state_dict({name: tensor.float().cpu() for name, tensor in model.state_dict().items()})
    target = CausalLM(copy.deepcopy(model))
    for prefixes in (PREFIXES, PREFIXES[:1]):
        cache = target.new_cache(64, len(prefixes))
        texts = [list(prefix) for prefix in prefixes]
        target.prefill(texts, cache)
        for _ in range(2):
            starts = list(cache.lengths)
            assert (max(starts) + len(TREE)) % 2 == 1, "an odd number of keys"
            logits = target.verify([TokenTree(torch.tensor(TOKENS), TREE)] * len(texts), cache).logits
            for row, text in enumerate(texts):
                _compare(logits[row].float().cpu(), _one_by_one(plain, text), TOLERANCE[dtype])
                cache.commit(row, starts[row], (0, 2))
                text += [TOKENS[0], TOKENS[2]]


def _one_by_one(plain: torch.nn.Module, text: list[int]) -> Tensor:
    """Return each node's logits, of shape (nodes, vocab), from a pass over only the text and the path to the node."""
    rows = []
    for node in range(len(TREE)):
        path = [TOKENS[0], *(TOKENS[ancestor] for ancestor in TREE.path(node))]
        with torch.inference_mode():
            rows.append(plain(torch.tensor([[*text, *path]]), use_cache=False).logits[0, -1])
    return torch.stack(rows)


def _compare(found: Tensor, expected: Tensor, tolerance: float) -> None:
    allowed = tolerance * float(expected.abs().max())
    error = float((found - expected).abs().max())
    assert error <= allowed, f"logits are off by {error:.4g} where rounding explains {allowed:.4g}"
    # The nodes differ by more than the tolerance; otherwise a mistake in a mask would not show.
    assert float((expected[1:] - expected[:-1]).abs().amax(-1).min()) > 2 * allowed

"""Print what transformers 4 reads from the drafts in a folder: for each draft the logits of a text, and the tokens.

Run with an old transformers first on the path: ``python reads_with_version_4.py FOLDER TOKENS TEXT``.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


def read(folder: Path, tokens: list[int], text: str) -> dict[str, Any]:
    # By default version 4 would run Gemma-2 with sdpa, which ignores soft capping.
    attention = "eager" if AutoConfig.from_pretrained(folder).model_type == "gemma2" else "sdpa"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0]
    return {
        "logits": logits.tolist(),
        "special": sorted(tokenizer.all_special_tokens),
        "ids": tokenizer(text)["input_ids"],
    }


def main() -> None:
    root, tokens, text = Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]
    found = {folder.name: read(folder, tokens, text) for folder in sorted(root.iterdir())}
    print(json.dumps({"version": transformers.__version__, "read": found}))


main()

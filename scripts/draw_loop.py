"""Draw the decoding loop on a real text: one step's tree, kept and dropped nodes, and the text growing pass by pass.

Usage: scripts/draw_loop.py --target MODEL --drafter SPEC --prompt TEXT [--output docs/explanation/loop.svg]

The picture holds the tokens that target and drafter write in fp32, greedily. Its tree is that of the step whose kept
nodes have the most letters, among the steps that dropped nodes too. An .svg follows the reader's light or dark scheme.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from loop_picture import DARK, LIGHT, Scene, draw, save
from transformers import PreTrainedTokenizerBase

from decoding.engine import Engine
from decoding.generate import DecodingConfig, Step
from decoding.headstart_model import HeadstartModel
from decoding.model.loading import eos_token_ids, load_tokenizer
from decoding.prompts import encode_prompt
from decoding.rules.tree import TokenTree

ROOT = Path(__file__).resolve().parent.parent


def chosen(steps: Sequence[Step], names: Sequence[Sequence[str]], leaves: int = 9) -> int:
    """Return the step to draw: it kept a node and dropped others, and its kept nodes have the most letters.

    Its tree has at most ``leaves`` leaves. ``names[i]`` are the texts of the tokens that step i wrote. ValueError where
    no step fits.
    """
    fit = [
        (sum(map(str.isalpha, "".join(names[place][: step.accepted]))), -place)
        for place, step in enumerate(steps)
        if step.tree and leaf_count(step.tree) <= leaves
        if 0 < step.accepted < min(len(step.tokens), len(step.tree) - 1)
    ]
    if not fit:
        raise ValueError("no step kept a node and dropped another: give another prompt, or a drafter of small trees")
    return -max(fit)[1]


def leaf_count(tree: TokenTree) -> int:
    return sum(not children for children in tree.shape.children)


def shown(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """Return a token's text without the space before it; white space alone has a sign."""
    text = str(tokenizer.decode([token]))
    return text.strip(" ").replace("\n", "⏎") or "␣"


def scene_of(steps: Sequence[Step], tokenizer: PreTrainedTokenizerBase) -> Scene:
    """Choose the step to draw, and write the tokens out."""
    names = [[shown(tokenizer, token) for token in step.tokens] for step in steps]
    drawn = chosen(steps, names)
    tree = steps[drawn].tree
    assert tree is not None
    before = str(tokenizer.decode([token for step in steps[:drawn] for token in step.tokens][:-1]))
    tail = before.replace("\n", " ")[-12:]
    space = " " if str(tokenizer.decode([tree.token_list[0]])).startswith(" ") else ""
    return Scene(
        steps,
        names,
        drawn,
        [shown(tokenizer, token) for token in tree.token_list],
        f"…{tail}{space}" if tail != before else tail,
    )


def main() -> None:
    """Read the options, decode, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="hub id or folder of the target")
    parser.add_argument("--drafter", required=True, help="drafter, as for headstart generate")
    parser.add_argument(
        "--prompt", required=True, help="text to answer, or to continue where there is no chat template"
    )
    parser.add_argument("--max-new-tokens", type=int, default=48, help="longest continuation, in tokens")
    parser.add_argument(
        "--output", type=Path, default=ROOT / "docs" / "explanation" / "loop.svg", help=".svg, or .png for a look"
    )
    parser.add_argument("--dark", action="store_true", help="draw a .png in the dark colours")
    options = parser.parse_args()
    model = HeadstartModel.from_pretrained(options.target, options.drafter, dtype=torch.float32)
    tokenizer = load_tokenizer(options.target)
    eos = eos_token_ids(model.target.model, tokenizer)
    config = DecodingConfig(max_new_tokens=options.max_new_tokens, eos_token_ids=eos, trees=True)
    prompt = encode_prompt(options.prompt, tokenizer, chat=True)
    scene = scene_of(list(Engine(model.target, model.drafter).steps(prompt, config)), tokenizer)
    source = f"{Path(options.target).name}, {type(model.drafter).__name__}, {options.prompt!r}"
    save(draw(scene, DARK if options.dark else LIGHT), options.output, source)
    print(f"written: {options.output}")


if __name__ == "__main__":
    main()

"""Draw the decoding loop on a real text: one step's tree, kept and dropped nodes, and the text growing pass by pass.

Usage: scripts/draw_loop.py --target MODEL --drafter SPEC --prompt TEXT [--output docs/loop.svg]

The picture holds the tokens that target and drafter write in fp32, greedily. Its tree is that of the step whose kept
nodes have the most letters, among the steps that dropped nodes too. An .svg follows the reader's light or dark scheme.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from loop_picture import DARK, LIGHT, Scene, Turn, draw, save
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from decoding.drafters import Drafter
from decoding.drafters.base import DraftRequest, DraftSession, TextStart
from decoding.engine import Engine
from decoding.generate import DecodingConfig
from decoding.headstart_model import HeadstartModel
from decoding.model.causal_lm import CausalLM
from decoding.model.loading import eos_token_ids, load_tokenizer
from decoding.policies import Budget
from decoding.prompts import encode_prompt
from decoding.rules.proposal import Proposal, ProposalKind
from decoding.rules.sampling import SamplingConfig
from decoding.rules.tree import TokenTree

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Recorder(Drafter):
    """A drafter that keeps the tree handed on last."""

    drafter: Drafter
    last: list[TokenTree] = field(default_factory=list)

    @property
    def reads_states(self) -> bool:
        return self.drafter.reads_states

    @property
    def budgets(self) -> tuple[Budget, ...]:
        return self.drafter.budgets

    def kinds(self, sampling: SamplingConfig) -> frozenset[ProposalKind]:
        return self.drafter.kinds(sampling)

    def open(self, target: CausalLM, sampling: SamplingConfig, rows: int, max_length: int) -> DraftSession:
        return RecordingSession(self.drafter.open(target, sampling, rows, max_length), self.last)


class RecordingSession:
    """A session that keeps the first row's tree."""

    def __init__(self, session: DraftSession, last: list[TokenTree]) -> None:
        self.session, self.last = session, last

    def admit(self, slot: int, start: TextStart) -> None:
        self.session.admit(slot, start)

    def move(self, slot: int, to: int) -> None:
        self.session.move(slot, to)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        proposals = self.session.propose(requests)
        self.last[:] = [proposals[0].tree]
        return proposals

    def observe(self, proposals: Sequence[Proposal], logits: Sequence[Tensor]) -> None:
        self.session.observe(proposals, logits)


def record(target: CausalLM, drafter: Drafter, prompt: Sequence[int], config: DecodingConfig) -> Iterator[Turn]:
    """Decode a prompt and yield each step with its tree."""
    recorder = Recorder(drafter)
    for step in Engine(target, recorder).steps(prompt, config):
        yield Turn(step, recorder.last.pop() if recorder.last and step.drafted else None)


def chosen(turns: Sequence[Turn], names: Sequence[Sequence[str]], leaves: int = 9) -> int:
    """Return the turn to draw: it kept a node and dropped others, and its kept nodes have the most letters.

    Its tree has at most ``leaves`` leaves. ``names[i]`` are the texts of the tokens that turn i wrote. ValueError where
    no turn fits.
    """
    fit = [
        (sum(map(str.isalpha, "".join(names[place][: turn.step.accepted]))), -place)
        for place, turn in enumerate(turns)
        if turn.tree and leaf_count(turn.tree) <= leaves
        if 0 < turn.step.accepted < min(len(turn.step.tokens), len(turn.tree) - 1)
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


def scene_of(turns: Sequence[Turn], tokenizer: PreTrainedTokenizerBase) -> Scene:
    """Choose the turn to draw, and write the tokens out."""
    names = [[shown(tokenizer, token) for token in turn.step.tokens] for turn in turns]
    drawn = chosen(turns, names)
    tree = turns[drawn].tree
    assert tree is not None
    before = str(tokenizer.decode([token for turn in turns[:drawn] for token in turn.step.tokens][:-1]))
    tail = before.replace("\n", " ")[-12:]
    space = " " if str(tokenizer.decode([tree.token_list[0]])).startswith(" ") else ""
    return Scene(
        turns,
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
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "loop.svg", help=".svg, or .png for a look")
    parser.add_argument("--dark", action="store_true", help="draw a .png in the dark colours")
    options = parser.parse_args()
    model = HeadstartModel.from_pretrained(options.target, options.drafter, dtype=torch.float32)
    assert model.drafter is not None
    tokenizer = load_tokenizer(options.target)
    eos = eos_token_ids(model.target.model, tokenizer)
    config = DecodingConfig(max_new_tokens=options.max_new_tokens, eos_token_ids=eos)
    prompt = encode_prompt(options.prompt, tokenizer, chat=True)
    scene = scene_of(list(record(model.target, model.drafter, prompt, config)), tokenizer)
    source = f"{Path(options.target).name}, {type(model.drafter).__name__}, {options.prompt!r}"
    save(draw(scene, DARK if options.dark else LIGHT), options.output, source)
    print(f"written: {options.output}")


if __name__ == "__main__":
    main()

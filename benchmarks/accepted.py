"""Measures tokens per target pass and speed-ups of heads, drafts and lookup on the same prompts and machine.

Each arm of `accepted_arms` is trained with each seed in a separate process; all arms use the same answers. Then
`--measure acceptance` decodes the prompts in batches with every way of drafting, to measure tokens per target pass.
`--measure speed` decodes the prompts one by one and alternates between plain decoding, assisted generation and the
drafters of the first seed. A run may be killed at any time: finished trainings and recorded texts are not repeated, and
a larger --limit adds prompts. `--summarise` writes the figures of all records.

    python benchmarks/accepted.py --target FOLDER --answers ANSWERS.jsonl --heldout HELD.jsonl \\
        --prompts gsm8k/test=TEST.jsonl --train --measure acceptance speed --summarise accepted.json
"""

# ruff: noqa: E402  # how threads wait is set before torch is imported
import argparse
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from decoding.threads import spin_briefly

spin_briefly()  # before torch is imported

from accepted_arms import ARMS, DRAFT, SETTINGS, Drafting, overrides_of
from accepted_figures import PEER, PLAIN, append_record, key_of, read_records, summary
from arms import ROOT, curve_of, slug, train, write

from decoding.drafters import Drafter
from decoding.drafters.registry import named_drafter
from decoding.dtypes import parse_dtype
from decoding.files.folder import is_heads_folder
from decoding.generate import DecodingConfig, Engine
from decoding.measure.machine import commit, hardware, versions
from decoding.measure.methods import Method, Run, our_method, transformers_method
from decoding.measure.questions import read_prompts
from decoding.model.causal_lm import CausalLM
from decoding.model.dspark_draft import DSparkDraft
from decoding.model.heads import MedusaHeads
from decoding.model.loading import (
    dspark_folder,
    eos_token_ids,
    load_draft,
    load_dspark,
    load_heads,
    load_model,
    load_tokenizer,
)
from decoding.rules.sampling import SamplingConfig
from decoding.text import check_prompt

RECIPES = ROOT / "recipes" / "storyteller-11m"


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parse(arguments)
    failed = train_arms(options) if options.train else []
    if options.measure:
        bench = Bench(options)
        if "acceptance" in options.measure:
            measure_acceptance(bench)
        if "speed" in options.measure:
            measure_speed(bench)
    if options.summarise:
        summarise(options)
    if failed:
        sys.exit(f"training failed: {', '.join(failed)}")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="folder of storyteller-11m or another small target")
    parser.add_argument("--answers", help="training rows, written by the target")
    parser.add_argument("--heldout", help="rows for evaluations during training")
    parser.add_argument("--prompts", nargs="+", default=[], metavar="NAME=FILE")
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--measure", nargs="*", choices=("acceptance", "speed"), default=[])
    parser.add_argument("--summarise", type=Path, metavar="FILE", help="write the figures of all records as JSON")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS), metavar="ARM")
    parser.add_argument("--draftings", nargs="+", help="ways of drafting, by name (default: all)")
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="training seeds")
    parser.add_argument(
        "--peer", default=DRAFT, choices=list(ARMS), metavar="ARM", help="arm with assisted generation's draft"
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/accepted"))
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--threads", type=int, help="threads of each training process")
    parser.add_argument("--limit", type=int, default=100, help="prompts of each set")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=16, help="prompts decoded at a time, for acceptance")
    parser.add_argument("--dtype", default="fast")
    return parser.parse_args(arguments)


# --- training ---------------------------------------------------------------------------------------------------------


def folder_of(runs: Path, arm: str, seed: int) -> Path:
    return runs / f"{slug(arm)}-seed-{seed}"


def train_arms(options: argparse.Namespace) -> list[str]:
    """Train every arm with the first seed, then with the next; return the arms and seeds that failed."""
    failed = []
    for seed in options.seeds:
        for name in options.arms:
            recipe = ARMS[name].recipe
            if recipe is None:
                continue
            given = {"target": options.target, "data.train": options.answers, "data.heldout": options.heldout}
            if recipe == "medusa1":  # the target is frozen, so it runs only once for all heads
                given["features.folder"] = options.runs / "features"
            overrides = overrides_of(ARMS[name], seed, options.steps, given)
            try:
                train(RECIPES / f"{recipe}.yaml", overrides, folder_of(options.runs, name, seed), options.threads)
            except subprocess.CalledProcessError:
                failed.append(f"{name} (seed {seed})")
                print(f"training failed: {failed[-1]}; the reason is above", flush=True)
    return failed


# --- measuring --------------------------------------------------------------------------------------------------------


Weights = MedusaHeads | CausalLM | DSparkDraft
"""Trained weights of an arm."""


class Bench:
    """The target, prompts and arms of a measurement, each loaded when first needed."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        model = load_model(options.target, parse_dtype(options.dtype))
        self.target, self.tokenizer = CausalLM(model), load_tokenizer(options.target)
        self.eos = eos_token_ids(model, self.tokenizer)
        self.path = options.runs / "records.jsonl"
        self.records = read_records(self.path)
        sets = dict(each.split("=", 1) for each in options.prompts)
        self.prompts = {name: self._prompts(file) for name, file in sets.items()}
        self._refused: set[tuple[str, str]] = set()
        self._commit = commit()

    def _prompts(self, file: str) -> list[tuple[int, ...]]:
        """Return the first ``--limit`` prompts that leave room for an answer, in a fixed random order."""
        prompts = read_prompts(file, self.tokenizer, sys.maxsize)
        random.Random(0).shuffle(prompts)
        most = self.target.max_positions
        fitting = [each for each in prompts if most is None or len(each) + self.options.max_new_tokens <= most]
        for prompt in fitting:
            check_prompt(self.target, prompt, self.options.max_new_tokens)
        return fitting[: self.options.limit]

    def config(self, setting: str) -> DecodingConfig:
        sampling = SamplingConfig(temperature=SETTINGS[setting])
        return DecodingConfig(self.options.max_new_tokens, sampling, eos_token_ids=self.eos)

    def is_ready(self, name: str, seed: int) -> bool:
        """Return True if the arm was trained with the seed; an arm without training has only seed 0."""
        if ARMS[name].recipe is None:
            return seed == 0
        return (folder_of(self.options.runs, name, seed) / "final").is_dir()

    def weights(self, name: str, seed: int) -> Weights | None:
        """Load an arm's weights; return None for an arm without weights."""
        if ARMS[name].recipe is None:
            return None
        folder = folder_of(self.options.runs, name, seed) / "final"
        if is_heads_folder(folder):
            return load_heads(folder, self.target)
        if dspark_folder(folder) is not None:
            return load_dspark(folder, self.target)
        return load_draft(str(folder), self.target, self.tokenizer)

    def drafters(self, name: str, weights: Weights | None) -> Iterator[tuple[str, Drafting, Drafter]]:
        """Yield the requested ways of drafting that the arm supports; for each other way, print once why it is left
        out.
        """
        for drafting, how in ARMS[name].draftings.items():
            if drafting not in (self.options.draftings or [drafting]):
                continue
            try:
                if drafting.startswith("fitted") and not (isinstance(weights, DSparkDraft) and weights.config.tree):
                    raise ValueError("its weights have no fitted tree: train it with draft.dspark.tree_nodes")
                yield drafting, how, named_drafter(how.drafter, weights, **how.options)
            except ValueError as error:
                if (name, drafting) not in self._refused:
                    print(f"{key_of(name, drafting)} is left out: {error}")
                self._refused.add((name, drafting))

    def record(self, record: dict[str, Any]) -> None:
        self.records.append(record)
        append_record(self.path, {**record, "commit": self._commit})


def measure_acceptance(bench: Bench) -> None:
    """Decode all prompts in batches with every way of drafting and every seed's weights; record each text's counts."""
    for seed in bench.options.seeds:
        for name in bench.options.arms:
            if not bench.is_ready(name, seed):
                continue
            for drafting, how, drafter in bench.drafters(name, bench.weights(name, seed)):
                for prompt_set, prompts in bench.prompts.items():
                    for setting in (each for each in how.settings if each in bench.options.settings):
                        place = {"arm": name, "drafting": drafting, "seed": seed, "set": prompt_set, "setting": setting}
                        _decode_rest(bench, place, how.spec, drafter, prompts)


def _decode_rest(
    bench: Bench, place: Mapping[str, Any], spec: str, drafter: Drafter, prompts: Sequence[Sequence[int]]
) -> None:
    """Decode the prompts that are not yet recorded."""
    wanted = {"part": "acceptance", **place, "spec": spec}
    done = [each for each in bench.records if all(each.get(key) == value for key, value in wanted.items())]
    first = sum(len(each["counts"]) for each in done)
    if first >= len(prompts):
        return
    rest, size = prompts[first:], bench.options.batch_size
    counts = [[0, 0] for _ in rest]
    seeds = range(first, len(prompts))
    engine = Engine(bench.target, drafter)
    for row, step in engine.steps(rest, bench.config(place["setting"]), batch_size=size, seeds=seeds):
        if not step.is_prefill:
            counts[row][0] += len(step.tokens)
            counts[row][1] += 1
    bench.record({**wanted, "first": first, "counts": counts})
    tokens, passes = (sum(each) for each in zip(*counts, strict=True))
    print(*place.values(), f"{tokens / max(passes, 1):.2f} tokens/pass, {len(rest)} prompts", sep=" · ", flush=True)


def measure_speed(bench: Bench) -> None:
    """Decode each prompt by every method in turns; record tokens and seconds."""
    name = Path(bench.options.target).name
    methods = {setting: timed_methods(bench, setting) for setting in bench.options.settings}
    for setting, by_key in methods.items():
        longest = max((each for prompts in bench.prompts.values() for each in prompts), key=len)
        for method in by_key.values():
            _decoded(method, longest, 0)  # warm-up
        for prompt_set, prompts in bench.prompts.items():
            for place, prompt in enumerate(prompts):
                wanted = {"part": "speed", "target": name, "set": prompt_set, "setting": setting, "prompt": place}
                _take_turns(bench, wanted, by_key, prompt)


def _decoded(method: Method, prompt: Sequence[int], seed: int) -> Run:
    assert method.decode is not None
    return method.decode([prompt], [seed], 1)[0]


def timed_methods(bench: Bench, setting: str) -> dict[str, Method]:
    """Make the timed methods: plain decoding, assisted generation with the peer's draft, and every way of drafting with
    the first seed's weights.
    """
    config, target = bench.config(setting), bench.target
    methods = {PLAIN: our_method(target, setting, PLAIN, None, config)}
    if bench.is_ready(bench.options.peer, 0):
        peer = bench.weights(bench.options.peer, 0)
        assert isinstance(peer, CausalLM), "assisted generation drafts with an ordinary model"
        methods[PEER] = transformers_method(target, setting, PEER, config, peer)
    for name in (each for each in bench.options.arms if bench.is_ready(each, 0)):
        for drafting, how, drafter in bench.drafters(name, bench.weights(name, 0)):
            if setting in how.settings:
                key = key_of(name, drafting)
                methods[key] = our_method(target, setting, key, drafter, config)
    return methods


def _take_turns(bench: Bench, wanted: dict[str, Any], methods: Mapping[str, Method], prompt: Sequence[int]) -> None:
    """Decode a prompt by plain decoding, the peer, and all methods without a record of the prompt."""
    done: set[str] = set()
    for record in bench.records:
        if all(record.get(key) == value for key, value in wanted.items()):
            done |= record["runs"].keys()
    missing = [key for key in methods if key not in done and key not in (PLAIN, PEER)]
    if not missing:
        return
    keys = [*(key for key in (PLAIN, PEER) if key in methods), *missing]
    turn = wanted["prompt"] % len(keys)
    runs = {key: _decoded(methods[key], prompt, wanted["prompt"]) for key in (*keys[turn:], *keys[:turn])}
    figures = {
        key: [
            run.decode_tokens,
            run.decode_seconds,
            sum(step.emitted for step in run.counts),
            len(run.counts),
            run.tokens == runs[PLAIN].tokens,
        ]
        for key, run in runs.items()
    }
    bench.record({**wanted, "runs": {key: figures[key] for key in keys}})


def summarise(options: argparse.Namespace) -> None:
    """Write the figures of all records and of the trainings that they use."""
    records = read_records(options.runs / "records.jsonl")
    rows = summary(records)
    trained = {}
    for name, arm in ARMS.items():
        folders = {seed: folder_of(options.runs, name, seed) for seed in range(100)}
        runs = {seed: curve_of(folder) for seed, folder in folders.items() if (folder / "final").is_dir()}
        if runs or arm.recipe is None or any(row["arm"] == name for row in rows):
            trained[name] = {**arm._asdict(), "seeds": runs}
            trained[name].pop("draftings")
    report = {
        "hardware": hardware(),
        "versions": versions(),
        "commits": sorted({record["commit"] for record in records}),
        "settings": {"steps": options.steps, "max_new_tokens": options.max_new_tokens, "peer": options.peer},
        "arms": trained,
        "rows": rows,
    }
    write(report, options.summarise)
    print(f"written: {options.summarise}")


if __name__ == "__main__":
    main()

"""Comparison of exports in other engines with our loop: greedy texts, passes, accepted drafts.

There is one row per engine and artefact, in fp32. It shows how many texts equal the texts of our plain decoding, and
the counts of the engine and of our loop. An engine without an environment is left out: `make engines` creates the
environment of llama.cpp, and `make vllm` creates the environment of vLLM.

    python benchmarks/served.py --target FOLDER --draft RUN --heads RUN --shared-heads RUN --dspark RUN \
        --dflash RUN --prompts FILE.jsonl --output FILE.json
"""

# ruff: noqa: E402  # how threads wait is set before torch is imported
import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from decoding.threads import spin_briefly

spin_briefly()  # before torch is imported

import engines
import torch
from rich.table import Table
from transformers import PreTrainedTokenizerBase

from decoding.drafters import Drafter, DraftModelDrafter, DSparkDrafter, MedusaDrafter
from decoding.measure.machine import commit, hardware, versions
from decoding.measure.questions import read_prompts
from decoding.measure.redact import basename
from decoding.model.causal_lm import CausalLM
from decoding.model.dspark_config import read_dspark_config
from decoding.model.loading import eos_token_ids, load_draft, load_dspark, load_heads, load_model, load_tokenizer
from trainer.export.companions import chain_length
from trainer.export.exporter import NO_PROMPTS, ExportSummary, export
from trainer.export.task import artefact_folder
from trainer.terminal.console import quiet_libraries, standard_output

METHODS = ("dspark", "dflash")
ARTEFACTS = {"draft": "draft"} | dict.fromkeys(("heads", "shared-heads"), "heads") | dict.fromkeys(METHODS, "dspark")
"""Names -> the formats that vLLM loads."""


class Bench(NamedTuple):
    """A target in fp32, the folders of its trained artefacts, and an empty folder for exports."""

    folder: str
    target: CausalLM
    tokenizer: PreTrainedTokenizerBase
    trained: dict[str, Path]
    exported: Path

    def export(self, name: str, format: str, **options: Any) -> ExportSummary:
        """Export without the exporter's test decoding, because decoding follows here."""
        source = Path(self.folder) if name == "target" else self.trained[name]
        folder = self.exported / f"{name}-{format}"
        return export(source, folder, format, target=self.folder, prompts=NO_PROMPTS, **options)

    def chain(self, name: str, folder: str, tokens: int) -> Drafter:
        """Return the drafter that drafts as a server does: a single chain of ``tokens`` tokens."""
        if name == "draft":
            return DraftModelDrafter(load_draft(folder, self.target, self.tokenizer), tokens)
        drafter: MedusaDrafter | DSparkDrafter
        if name in METHODS:
            drafter = DSparkDrafter(load_dspark(folder, self.target), tokens)
        else:
            chain = tuple((0,) * depth for depth in range(1, tokens + 1))
            drafter = MedusaDrafter(load_heads(self.trained[name], self.target), chain)
        return drafter


def vllm_cases(bench: Bench) -> list[engines.VllmCase]:
    """Return starts of vLLM: for plain decoding, and for each artefact by the command that the artefact's export
    prints.
    """
    cases = [engines.VllmCase("plain decoding")]
    for name in bench.trained:
        summary = bench.export(name, ARTEFACTS[name])
        given = engines.arguments_of(summary.commands[0].argv)
        drafter = bench.chain(name, str(summary.folder), given["speculation"]["num_speculative_tokens"])
        cases.append(engines.VllmCase(name, drafter=drafter, **given))
    return cases


def llama_cpp_cases(bench: Bench) -> list[engines.LlamaCppCase]:
    """Return starts of llama.cpp for plain decoding and for each draft, with files in fp32."""
    target = bench.export("target", "gguf", type="f32").folder / "model.gguf"
    cases = [engines.LlamaCppCase("plain decoding", target)]
    for name in bench.trained.keys() & {"draft", *METHODS}:
        draft, trained = bench.export(name, "gguf", type="f32").folder / "model.gguf", bench.trained[name]
        tokens = read_dspark_config(trained).block_size if name in METHODS else chain_length(trained)
        drafter, method = bench.chain(name, str(trained), tokens), name if name in METHODS else "simple"
        cases.append(engines.LlamaCppCase(name, target, draft, tokens, drafter, method=method))
    return cases


def measure(bench: Bench, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[dict[str, Any]]:
    """Return the rows of every engine with an installed environment."""
    rows = []
    if engines.LLAMA_CPP.is_file():
        ends = eos_token_ids(bench.target.model, bench.tokenizer)
        rows += engines.serve_llama_cpp(bench.target, llama_cpp_cases(bench), prompts, max_new_tokens, ends)
    if engines.vllm_python() is not None:
        rows += engines.serve_vllm(Path(bench.folder), bench.target, vllm_cases(bench), prompts, max_new_tokens)
    if not rows:
        raise SystemExit("no engine is installed: run make engines, or make vllm")
    return [{key: value for key, value in row.items() if key not in _LEFT_OUT} for row in rows]


_LEFT_OUT = ("texts", "logprobs", "tokenised")


def without_folders(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row for publication, with folders cut to their last part."""
    speculation = row.get("speculation") or {}
    cut = {key: basename(value) if isinstance(value, str) else value for key, value in speculation.items()}
    return {**row, "speculation": cut or None}


def table(report: dict[str, Any]) -> Table:
    """Return the rows as a table for the terminal."""
    shown = Table("engine", "artefact", "batch", "texts equal", "passes", "drafted", "accepted by position", "start")
    for row in report["rows"]:
        theirs, ours = row.get("theirs") or {}, row.get("ours") or {}
        shown.add_row(
            row["engine"],
            row["artefact"],
            str(row.get("batch_size", 1)),
            row.get("error") or f"{row['equal']}/{row['prompts']}",
            *(f"{theirs.get(key)} / {ours.get(key)}" for key in ("passes", "drafted", "accepted")),
            f"{row.get('setup_seconds', 0):.1f} s",
        )
    return shown


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="folder of the target")
    for name in ARTEFACTS:
        parser.add_argument(f"--{name}", type=Path, help="folder of a training run (optional)")
    parser.add_argument("--prompts", required=True, help=".jsonl file")
    parser.add_argument("--limit", type=int, default=20, help="prompts")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--output", type=Path, required=True, help="JSON to write")
    options = vars(parser.parse_args(arguments))
    quiet_libraries()

    model, tokenizer = load_model(options["target"], torch.float32), load_tokenizer(options["target"])
    given = {name: options[name.replace("-", "_")] for name in ARTEFACTS}
    trained = {name: artefact_folder(folder) for name, folder in given.items() if folder is not None}
    prompts = read_prompts(options["prompts"], tokenizer, options["limit"])
    with tempfile.TemporaryDirectory() as exported:
        bench = Bench(options["target"], CausalLM(model), tokenizer, trained, Path(exported))
        rows = measure(bench, prompts, options["max_new_tokens"])
    report = {
        "target": basename(options["target"]), "prompts": len(prompts), "set": basename(options["prompts"]),
        "max_new_tokens": options["max_new_tokens"], "dtype": "fp32", "rows": [without_folders(row) for row in rows],
        "hardware": hardware(), "versions": versions(), "commit": commit(),
    }  # fmt: skip
    options["output"].parent.mkdir(parents=True, exist_ok=True)
    options["output"].write_text(json.dumps(report, indent=1) + "\n")
    standard_output(width=160).print(table(report))


if __name__ == "__main__":
    main()

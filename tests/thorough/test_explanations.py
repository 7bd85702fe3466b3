"""The pages of explanation: their pictures and tables are up to date, and have the numbers of the rules and of the
formula for expected tokens.
"""

import json
import math
import re
import sys
from importlib import import_module
from pathlib import Path

import pytest
from matplotlib.colors import to_hex

from decoding.rules.tree import ProposalKind
from decoding.rules.verify import RULES

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))  # the folder of the scripts
explained, pictures = import_module("explained"), import_module("explanation_pictures")
tables, drawn, loop = (
    import_module("explanation_tables"),
    import_module("draw_explanations"),
    import_module("picture_card"),
)

P, Q = explained.P, explained.Q


@pytest.mark.parametrize("name", explained.EXAMPLES)
def test_the_bars_of_a_lossless_rule_end_at_the_distribution_that_it_has_to_write(name: str) -> None:
    example = explained.EXAMPLES[name]
    written = [sum(row) for row in explained.split(name)]
    assert math.isclose(sum(written), 1)
    ends = written == pytest.approx(explained.wanted(example.rule), abs=1e-12)
    assert ends == RULES[example.rule].lossless


@pytest.mark.parametrize("rule", ["token", "block"])
def test_both_rules_of_a_chain_write_each_text_as_p_does_and_block_verification_keeps_more(rule: str) -> None:
    for (first, second), row in explained.pairs(rule).items():
        assert sum(row) == pytest.approx(P[first] * P[second], abs=1e-12)
    kept = {name: sum(row[1] + 2 * row[2] for row in explained.pairs(name).values()) for name in ("token", "block")}
    assert kept["block"] > kept["token"] + 0.05
    assert kept[rule] == pytest.approx(explained.kept_tokens(rule, ProposalKind.SAMPLED, "a chain of two"))


@pytest.mark.parametrize("kind", [ProposalKind.SAMPLED, ProposalKind.SAMPLED_WITHOUT_REPLACEMENT])
def test_recursive_rejection_by_hand_gives_what_the_enumeration_gives(kind: ProposalKind) -> None:
    name = "recursive" if kind is ProposalKind.SAMPLED else "recursive-without"
    lines = tables.by_hand_recursive(kind).splitlines()[2:]
    assert len(lines) == len(P)
    for line, (first, second, own) in zip(lines, explained.split(name), strict=True):
        _, kept, _, again, written, total = line.strip("| ").split(" | ")
        assert [float(each) for each in (kept, again, written)] == pytest.approx([first, second, own], abs=1e-4)
        assert float(total) == pytest.approx(first + second + own, abs=1e-4)


def test_the_blocks_by_hand_name_the_enumerated_figures() -> None:
    token = [line.strip("| ").split(" | ") for line in tables.by_hand_token().splitlines()[2:]]
    assert [float(row[3]) for row in token] == pytest.approx([row[0] for row in explained.split("token")])
    assert [float(row[4]) for row in token] == pytest.approx([r[1] for r in explained.split("token")])
    both = explained.pairs("block")[(1, 0)]
    assert (
        both[2] == pytest.approx(P[1] * P[0])
        and f"= {pictures.number(both[2])}, all of p(b) p(a)" in tables.by_hand_block()
    )
    top = explained.split("top-k")
    assert f"p(S) = {pictures.number(sum(sum(row[:-1]) for row in top))}" in tables.by_hand_top()
    assert f"draws from it with {pictures.number(sum(row[-1] for row in top))}." in tables.by_hand_top()
    assert pictures.number(sum(explained.split("typical")[1])) in tables.by_hand_typical()


def test_the_measured_costs_are_those_of_the_published_report() -> None:
    (path,) = (ROOT / "benchmarks" / "results").glob("*/smollm2.json")
    raw = json.loads(path.read_text())["cost_curve_ms"]
    assert explained.measured_costs() == pytest.approx({int(size): raw[size] / raw["1"] for size in raw})


def test_the_tree_and_its_mask_are_those_of_the_best_tree() -> None:
    shape, paths, probabilities = explained.example_tree()
    assert len(paths) == explained.NODES == len(shape) - 1
    assert shape.path(pictures.KEPT[-1]) == pictures.KEPT
    figure = pictures.draw_mask(loop.LIGHT)
    cells = [patch for patch in figure.axes[0].patches if patch.get_width() == 14 and patch.get_height() == 14]
    assert len(cells) == len(shape) ** 2
    filled = [to_hex(cell.get_facecolor()) != loop.LIGHT["band"] for cell in cells]
    assert filled == shape.ancestor_mask.flatten().tolist()
    assert sum(probabilities) == pytest.approx(explained.kept_of_trees(explained.NODES)[1])


def test_the_pictures_and_tables_in_docs_are_those_that_the_script_writes_now(tmp_path: Path) -> None:
    for name in drawn.BLOCKS:
        page = (drawn.FOLDER / f"{name}.md").read_text()
        (tmp_path / f"{name}.md").write_text(page)
    drawn.main(tmp_path)
    assert len(list(tmp_path.glob("*.svg"))) == len(drawn.PICTURES) >= 15
    for path in tmp_path.iterdir():
        committed = (drawn.FOLDER / path.name).read_text()
        assert path.read_text() == committed, f"{path.name}: run scripts/draw_explanations.py"


def test_the_figures_in_the_prose_are_the_computed_ones() -> None:
    rules = (drawn.FOLDER / "exactness.md").read_text()
    for name, values in (("p", P), ("q", Q)):
        assert f"${name} = ({', '.join(f'{value:g}' for value in values)})$" in rules

    def kept(name: str) -> str:
        return f"{sum(sum(row[:-1]) for row in explained.split(name)):g}"

    def described(picture: str) -> str:
        return re.findall(rf"!\[([^\]]+)\]\({picture}\.svg\)", rules)[0]

    for name in ("sampled-verify", "token", "recursive", "recursive-without"):
        assert re.findall(r"0\.\d+", described(f"rule-{name}"))[0] == kept(name)
    for rule in ("token", "block"):
        value = explained.kept_tokens(rule, ProposalKind.SAMPLED, "a chain of two")
        assert re.findall(r"\d\.\d+", described(f"pairs-{rule}")) == [f"{value:.4g}"]
    assert (explained.NODES, len(pictures.KEPT), max(explained.DEPTHS)) == (8, 2, 8)
    law = (drawn.FOLDER / "speculation.md").read_text()
    assert f"(at most {explained.MOST_DEPTH})" in law
    assert "for chains of {}, {}, {} and {} tokens".format(*explained.DEPTHS) in law
    assert "for draft costs {:g}, {:g} and {:g}".format(*explained.DRAFT_COSTS) in law
    written = sum(explained.split("typical")[1])
    assert re.findall(r"0\.\d+", described("rule-typical")) == [f"{written:g}", f"{P[1]:g}"]

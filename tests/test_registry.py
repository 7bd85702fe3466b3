"""The registry of drafters: valid specs, the drafters that they make, and that every drafter decodes like plain
decoding.
"""

from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis_profiles import few
from tiny_dspark import tiny_dflash, tiny_dspark
from tiny_eagle3 import tiny_eagle3
from tiny_models import naive_greedy, tiny_model
from tiny_tokenizer import byte_tokenizer

from decoding import DecodingConfig, Engine
from decoding.drafters import (
    CascadeDrafter,
    Drafter,
    DraftModelDrafter,
    DraftTreeDrafter,
    DSparkDrafter,
    Eagle3Drafter,
    Eagle3TreeDrafter,
    HybridDrafter,
    LookaheadDrafter,
    MedusaDrafter,
    OtherTokenizerDrafter,
    PromptLookupDrafter,
)
from decoding.drafters.registry import REGISTRY, DrafterLoader, named_drafter, parse_drafter
from decoding.drafters.spec import all_paths
from decoding.model.causal_lm import CausalLM
from decoding.model.heads import MedusaConfig, MedusaHeads
from decoding.rules.sampling import SamplingConfig
from trainer.commands.models import published_specs

SPECS: dict[str, tuple[type, dict[str, Any], str]] = {
    "heads:PATH/heads": (MedusaDrafter, {"max_nodes": 10}, "medusa, tree of 9"),
    "heads:PATH/heads,tree=0/0.0,sampled=false": (MedusaDrafter, {"max_depth": 2}, "medusa, deterministic chain of 2"),
    "draft:PATH/draft": (DraftModelDrafter, {"tokens": 4}, "draft model, 4 tokens"),
    "draft:PATH/draft,tokens=3,sampled=false": (DraftModelDrafter, {"tokens": 3}, "draft model, 3 likeliest tokens"),
    "draft-tree:PATH/draft,depth=3,width=2,nodes=7": (
        DraftTreeDrafter,
        {"depth": 3, "width": 2, "max_nodes": 7},
        "draft model, tree of 6",
    ),
    "dspark:PATH/dspark,tokens=2": (DSparkDrafter, {"max_depth": 2}, "dspark, 2 tokens"),
    "dspark:PATH/dflash,tree=0/1/0.0": (DSparkDrafter, {"max_nodes": 4}, "dflash, tree of 3"),
    "eagle3:PATH/eagle3": (Eagle3Drafter, {"max_depth": 4}, "eagle3, 4 tokens"),
    "eagle3:PATH/eagle3,tree=0/1/0.0,sampled=false": (
        Eagle3Drafter,
        {"max_nodes": 4},
        "eagle3, deterministic tree of 3",
    ),
    "eagle3-tree:PATH/eagle3,depth=3,width=2,nodes=7": (
        Eagle3TreeDrafter,
        {"depth": 3, "width": 2, "max_nodes": 7},
        "eagle3, best tree of 6",
    ),
    "lookup": (PromptLookupDrafter, {"tokens": 10, "ngram": 3}, "prompt lookup"),
    "lookup:tokens=3,ngram=2,branches=2": (
        PromptLookupDrafter,
        {"tokens": 3, "ngram": 2, "branches": 2},
        "prompt lookup",
    ),
    "lookahead:window=3,ngram=3,guesses=2": (
        LookaheadDrafter,
        {"window": 3, "ngram": 3, "guesses": 2, "max_nodes": 10},
        "lookahead, W=3 N=3 G=2",
    ),
    "cascade:PATH/draft,small=PATH/smaller,tokens=5": (
        CascadeDrafter,
        {"tokens": 5, "max_depth": 5},
        "cascade, 5 tokens",
    ),
    "hybrid:PATH/heads,lookup_tokens=3": (HybridDrafter, {"max_depth": 4}, "medusa, tree of 9, with prompt lookup"),
    "hybrid:PATH/draft,of=draft-tree,depth=2,nodes=5": (
        HybridDrafter,
        {},
        "draft model, tree of 4, with prompt lookup",
    ),
    "other-tokenizer:PATH/stranger,tokens=3": (
        OtherTokenizerDrafter,
        {"tokens": 3},
        "draft model with another tokenizer, 3 tokens",
    ),
    "PATH/heads": (HybridDrafter, {"max_depth": 10}, "medusa, tree of 9, with prompt lookup"),
    "PATH/dspark,tokens=2": (HybridDrafter, {"max_depth": 10}, "dspark, 2 tokens, with prompt lookup"),
    "PATH/eagle3,tokens=2": (HybridDrafter, {"max_depth": 10}, "eagle3, 2 tokens, with prompt lookup"),
    "PATH/eagle3,nodes=7": (HybridDrafter, {"max_depth": 10}, "eagle3, best tree of 6, with prompt lookup"),
    "PATH/draft,tokens=2": (HybridDrafter, {}, "draft model, 2 tokens, with prompt lookup"),
    "PATH/draft,depth=2,lookup_tokens=3": (
        HybridDrafter,
        {"max_depth": 3},
        "draft model, tree of 20, with prompt lookup",
    ),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write heads, a draft, a smaller draft, a draft with another tokenizer, and DSpark, DFlash and EAGLE-3 drafts."""
    folder = tmp_path_factory.mktemp("models")
    for name, shift, seed in (("draft", 0, 1), ("smaller", 0, 2), ("stranger", 1, 1)):
        tiny_model(vocab=130, seed=seed).save_pretrained(folder / name)
        byte_tokenizer(shift=shift).save_pretrained(folder / name)
    for name, make in (("dspark", tiny_dspark), ("dflash", tiny_dflash), ("eagle3", tiny_eagle3)):
        make(CausalLM(tiny_model(vocab=130))).save_pretrained(folder / name)
    MedusaHeads.for_target(tiny_model(vocab=130), MedusaConfig(16, 130)).save_pretrained(folder / "heads")
    return folder


@pytest.fixture(scope="module")
def target() -> CausalLM:
    return CausalLM(tiny_model(vocab=130))


@pytest.mark.parametrize("text", few(SPECS, [*SPECS][::2]))
def test_a_spec_makes_its_drafter_which_decodes_as_plain_decoding(models: Path, target: CausalLM, text: str) -> None:
    kind, settings, label = SPECS[text]
    spec = parse_drafter(text.replace("PATH", str(models)))
    drafter = DrafterLoader(target, byte_tokenizer()).load(spec)
    assert type(drafter) is kind and drafter.label == label
    assert {name: getattr(drafter, name) for name in settings} == settings
    prompt = list(b"ab ab ab a")
    assert Engine(target, drafter).decode(prompt, DecodingConfig(12)).tokens == naive_greedy(target.model, prompt, 12)
    assert parse_drafter(str(spec)) == spec, "a spec in words reads back as itself"


def test_every_name_of_the_registry_is_tried_above_and_is_on_its_pages() -> None:
    assert {text.partition(":")[0] for text in SPECS} >= REGISTRY.keys() and len(REGISTRY) == 11
    for page in ("how-to/python.md", "explanation/methods.md"):
        text = (Path(__file__).parent.parent / "docs" / page).read_text()
        assert all(f"`{name}" in text for name in REGISTRY), page


def test_a_path_may_hold_commas(tmp_path: Path) -> None:
    path = tmp_path / "a,b=1,c"
    path.mkdir()
    spec = parse_drafter(f"draft:{path},tokens=3")
    assert (spec.path, spec.options) == (str(path), {"tokens": 3}) and parse_drafter(str(spec)) == spec


MISTAKES = {
    "lokup": "no drafter is called 'lokup': choose one of heads, draft, draft-tree, dspark, eagle3, eagle3-tree",
    "distilgpt2": f"no drafter is called 'distilgpt2': choose one of {', '.join(REGISTRY)}, or draft:distilgpt2 for a",
    "lookup:ngrams=3": "the drafter lookup does not take 'ngrams': choose among tokens, ngram, min_ngram, branches",
    "lookup:ngram=0": "the drafter lookup is given ngram=0: use a whole number of at least 1",
    "heads": "'heads' lacks the path of the weights: write heads:PATH with a folder or Hub id of heads",
    "dspark:x,tree=16": "the drafter dspark is given tree=16: use paths of ranks, such as 0/1/0.0/0.1, not a size",
    "lookahead:window=0": "the drafter lookahead is given window=0: use a whole number of at least 1",
    "lookahead:x,window=2": "'lookahead:x,window=2' has the path x, but lookahead does not read weights: remove",
    "cascade:x": "'cascade:x' lacks small: write cascade:PATH,small=PATH, a folder or Hub id of a draft",
    "cascade:x,small=": "the drafter cascade is given small=: use a folder or Hub id of a draft",
    "hybrid:x,of=lookup": "the drafter hybrid is given of=lookup: use one of heads, draft, draft-tree",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_a_mistake_in_a_spec_is_one_sentence(text: str) -> None:
    with pytest.raises(ValueError) as raised:
        parse_drafter(text)
    assert str(raised.value).startswith(MISTAKES[text]) and "\n" not in str(raised.value)


def test_a_drafter_by_text_needs_the_targets_tokenizer(models: Path, target: CausalLM) -> None:
    with pytest.raises(ValueError, match=r"the target's tokenizer is unknown.*: pass the .* as tokenizer"):
        DrafterLoader(target).load(parse_drafter(f"other-tokenizer:{models}/stranger"))


def test_weights_are_read_once_however_many_drafters_share_them(models: Path, target: CausalLM) -> None:
    loader = DrafterLoader(target, byte_tokenizer())
    specs = [f"draft:{models}/draft", f"draft-tree:{models}/draft", f"cascade:{models}/draft,small={models}/smaller"]
    chain, tree, cascade, small = (
        cast(Any, loader.load(parse_drafter(text))) for text in (*specs, f"draft:{models}/smaller")
    )
    assert chain.draft is tree.draft is cascade.draft and cascade.small is small.draft
    with pytest.raises(
        ValueError, match="both drafts of the cascade are the same model: pass a smaller model as small"
    ):
        loader.load(parse_drafter(f"cascade:{models}/draft,small={models}/draft"))


def test_the_path_of_a_further_draft_is_one_of_the_specs_and_no_report_publishes_its_folder() -> None:
    spec = parse_drafter("cascade:ORG/large,small=/home/me/small,tokens=5")
    assert all_paths({"a": spec}) == {"a": "ORG/large", "a small": "/home/me/small"}
    assert published_specs([spec]) == ["cascade:ORG/large,small=small,tokens=5"]


def test_weights_in_memory_make_the_same_drafters(target: CausalLM) -> None:
    draft = CausalLM(tiny_model(vocab=130, seed=1))
    drafter: Drafter = named_drafter("draft", draft, tokens=3)
    assert isinstance(drafter, DraftModelDrafter) and drafter.draft is draft and drafter.tokens == 3
    hybrid = named_drafter("hybrid", draft, of="draft-tree", depth=2, lookup_tokens=3, least_gain=0.5)
    assert isinstance(hybrid, HybridDrafter) and hybrid.first.max_depth == 2 and hybrid.lookup.max_depth == 3
    assert hybrid.least_gain == 0.5
    smaller = CausalLM(tiny_model(vocab=130, seed=2))
    cascade = named_drafter("cascade", draft, small=smaller, small_tokens=2)
    assert isinstance(cascade, CascadeDrafter) and (cascade.draft, cascade.small) == (draft, smaller)
    with pytest.raises(ValueError, match="ngram is 1: use at least 2"):
        named_drafter("lookahead", ngram=1)
    with pytest.raises(ValueError, match="no drafter is called 'drafts'"):
        named_drafter("drafts", draft)
    with pytest.raises(ValueError, match="samples its tokens, so a hybrid cannot use it as the lookup: use prompt"):
        HybridDrafter(DraftModelDrafter(draft), DraftModelDrafter(smaller)).kinds(SamplingConfig(1.0))
    with pytest.raises(ValueError, match="write of=NAME with one of heads, draft, draft-tree"):
        named_drafter("hybrid", draft, lookup_tokens=3)

"""The history that the controls read at every node of any tree, while the text grows."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from decoding.rules.sampling import History, HistoryRows, SamplingConfig
from decoding.rules.tree import TokenTree, TreeShape

VOCAB = 5


def nothing(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores


EVERYTHING = SamplingConfig(repetition_penalty=1.2, processors=(nothing,))


def rows_by_hand(tokens: list[int], tree: TokenTree, nodes: list[int]) -> list[tuple[list[int], ...]]:
    """Return, for each node, the tokens that were seen and the text."""
    rows = []
    for node in nodes:
        path = []
        while node != 0:
            path.insert(0, int(tree.tokens[node]))
            node = tree.shape.parents[node]
        text = tokens + path
        seen = [int(token in text) for token in range(VOCAB)]
        rows.append((seen, text))
    return rows


def listed(rows: HistoryRows) -> list[tuple[list[int], ...]]:
    assert rows.seen is not None and rows.texts is not None
    texts = [rows.texts[row, :length].tolist() for row, length in enumerate(rows.lengths)]
    return list(zip(rows.seen.int().tolist(), texts, strict=True))


@st.composite
def trees(draw: st.DrawFn, root: int) -> tuple[list[int], tuple[int, ...]]:
    """Draw the tokens and parents of the nodes."""
    size = draw(st.integers(1, 7))
    parents = (-1, *(draw(st.integers(0, node - 1)) for node in range(1, size)))
    return [root, *draw(st.lists(st.integers(0, VOCAB - 1), min_size=size - 1, max_size=size - 1))], parents


@given(data=st.data())
def test_each_node_knows_its_text_whatever_was_asked_before(data: st.DataObject) -> None:
    prompt_length = data.draw(st.integers(1, 4))
    history = History(EVERYTHING, prompt_length, VOCAB, "cpu")
    text = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=prompt_length, max_size=6))
    for _ in range(data.draw(st.integers(1, 6))):
        tree_tokens, parents = data.draw(trees(text[-1]))
        tree = TokenTree(torch.tensor(tree_tokens), TreeShape(parents))
        nodes = data.draw(st.none() | st.lists(st.integers(0, len(tree) - 1), max_size=4))
        rows = history.at(data.draw(st.sampled_from([text, tuple(text)])), tree, nodes)
        asked = list(range(len(tree))) if nodes is None else nodes
        assert listed(rows) == rows_by_hand(text, tree, asked)
        assert rows.prompt_lengths == (prompt_length,) * len(asked)
        text = text + data.draw(st.lists(st.integers(0, VOCAB - 1), max_size=3))

"""The families and attentions that tests/test_target.py leaves out, in the same tests."""

import pytest
import test_target as few
from tiny_models import OTHER_ATTENTIONS


@pytest.mark.parametrize(("family", "attention"), OTHER_ATTENTIONS)
def test_every_nodes_logits_are_those_of_its_path_alone(family: str, attention: str) -> None:
    few.test_every_nodes_logits_are_those_of_its_path_alone(family, attention)


@pytest.mark.parametrize(("family", "attention"), OTHER_ATTENTIONS)
def test_rows_of_different_lengths_and_trees_are_each_row_alone(family: str, attention: str) -> None:
    few.test_rows_of_different_lengths_and_trees_are_each_row_alone(family, attention)


@pytest.mark.parametrize(("family", "attention"), OTHER_ATTENTIONS)
def test_a_text_appended_in_blocks_is_the_text_run_whole(family: str, attention: str) -> None:
    few.test_a_text_appended_in_blocks_is_the_text_run_whole(family, attention)


@pytest.mark.parametrize(("family", "attention"), OTHER_ATTENTIONS)
def test_prefill_append_and_step_of_ragged_rows_are_each_row_alone(family: str, attention: str) -> None:
    few.test_prefill_append_and_step_of_ragged_rows_are_each_row_alone(family, attention)


@pytest.mark.parametrize(("family", "attention"), OTHER_ATTENTIONS)
def test_rows_of_one_length_step_without_a_mask_of_ours(family: str, attention: str) -> None:
    few.test_rows_of_one_length_step_without_a_mask_of_ours(family, attention)

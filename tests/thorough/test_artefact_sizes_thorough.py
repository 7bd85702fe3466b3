"""What an artefact's files claim is compared with what they hold, before anything is built."""

from pathlib import Path

import pytest
from test_artefact_sizes import INDEX
from tiny_models import FAMILIES, tiny_model

from decoding.model.folder import check_model_folder


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_folders_of_every_family_are_what_they_claim(family: str, tied: bool, tmp_path: Path) -> None:
    tiny_model(family, vocab=128, tie_word_embeddings=tied).save_pretrained(tmp_path / "one")
    tiny_model(family, vocab=128, tie_word_embeddings=tied).save_pretrained(tmp_path / "many", max_shard_size="8KB")
    assert (tmp_path / "many" / INDEX).is_file()
    check_model_folder(tmp_path / "one")
    check_model_folder(tmp_path / "many")

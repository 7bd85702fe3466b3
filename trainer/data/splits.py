"""The two data sets of a recipe: the rows to train on, and those that are held out."""

from transformers import PreTrainedTokenizerBase

from trainer.data.dataset import Dataset, load_dataset
from trainer.processes import agreed
from trainer.quickstart import resolve
from trainer.recipe.common import DataSection


def load_splits(section: DataSection, tokenizer: PreTrainedTokenizerBase) -> tuple[Dataset, Dataset]:
    """Load the training data and the held-out data, which is never packed. ValueError for rows that cannot be used."""
    heldout = load_heldout_data(section, tokenizer)
    return load_training_data(section, tokenizer), heldout


def not_held_out(heldout: str, train: str) -> str:
    """Return a warning that two settings name the same rows."""
    return f"warning: {heldout} is the same data as {train}, so held-out figures are of texts that were learnt"


def load_heldout_data(section: DataSection, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Load the held-out data alone, never packed."""
    apart = section.model_copy(update={"split": section.heldout_split, "packing": False})
    try:
        return load_dataset(resolve(section.heldout), apart, tokenizer)
    except ValueError as error:
        raise ValueError(f"data.heldout: {error}") from error


def load_training_data(section: DataSection, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Load the training data alone. Every process calls this: one machine may have to tokenize it."""
    return agreed(lambda: load_dataset(resolve(section.train), section, tokenizer), patient=True)

"""The card's metadata for the Hub, by `huggingface_hub`'s own classes: only facts that were recorded or measured."""

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from decoding.measure.markdown import one_line
from trainer.export.artefact import Artefact
from trainer.export.formats import FORMATS
from trainer.export.measured import Measured

TAG = "headstart"
"""A tag of every card: `export` replaces no folder whose card lacks it."""
_TASK = "text-generation"


def method_of(artefact: Artefact) -> str:
    """Return the method's tag: ``medusa``, ``draft-model`` or ``parallel-draft``."""
    if artefact.is_draft:
        return "parallel-draft" if artefact.at_once else "draft-model"
    return "medusa"


def card_data(
    artefact: Artefact,
    title: str,
    base_model: str | None,
    datasets: tuple[str, ...] = (),
    measured: Measured | None = None,
    license: str | None = None,
) -> ModelCardData:
    """Return the metadata. ``base_model`` and ``datasets`` are ids of the Hub; ``title`` names the model's results.

    Heads are related to their target as an adapter: they hold no model of their own. The Hub has no word for the
    relation of a draft to its target.
    """
    method = method_of(artefact)
    results = _results(measured) if measured else []
    return ModelCardData(
        library_name=FORMATS[artefact.format].library,
        license=license,
        base_model=base_model,
        datasets=list(datasets) or None,
        tags=["speculative-decoding", method, *(["draft-model"] if method == "parallel-draft" else []), TAG],
        pipeline_tag=_TASK,
        model_name=one_line(title) if results else None,
        eval_results=results or None,
        base_model_relation="adapter" if base_model and not artefact.is_draft else None,
    )


def check_metadata(card: str, written: ModelCardData) -> None:
    """Assert that a card reads back with the metadata that were written."""
    assert ModelCard(card).data.to_yaml() == written.to_yaml(), "the card's metadata read back differently"


def _results(measured: Measured) -> list[EvalResult]:
    """Return speed-up and tokens per pass of the artefact's best method at each temperature.

    Prompts and hardware stand in the data set's name, as a speed without them says nothing.
    """
    prompts = one_line(measured.prompts_from or "prompts")
    place = one_line(
        f"{prompts}: {measured.prompts} prompts{measured.cell}, {measured.max_new_tokens} new tokens, on "
        f"{measured.hardware} in {measured.dtype}"
    )
    return [
        EvalResult(
            task_type=_TASK,
            dataset_type=prompts,
            dataset_name=place,
            dataset_config=one_line(best.setting),
            metric_type=type,
            metric_name=one_line(name),
            metric_value=value,
        )
        for best in measured.best
        for type, name, value in best.values
    ]

"""The loss section, one for heads and drafts, and the names of the terms that a loss is mixed of.

A recipe is read without torch: the formulas behind the names are in `trainer.learning.losses`.
"""

from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, model_validator

from trainer.recipe.common import Section

Divergence = Literal["forward_kl", "reverse_kl", "jsd", "acceptance"]
"""Terms that compare the logits with the target's."""
Term = Literal["cross_entropy", Divergence]
"""Terms on the logits."""

Weight = Annotated[float, Field(ge=0)]


class LossSection(Section):
    """Weights of the loss's terms. p is the target's distribution, q the draft's or the head's.

    A term that is not named weighs 0. A section that names no term takes its kind's default: cross_entropy 1 for heads,
    forward_kl 1 for drafts.
    """

    forward_kl: Weight = 0.0
    """KL(p‖q)."""
    reverse_kl: Weight = 0.0
    """KL(q‖p)."""
    jsd: Weight = 0.0
    """Jensen-Shannon divergence with the mixture ``jsd_beta`` p + (1 − ``jsd_beta``) q."""
    acceptance: Weight = 0.0
    """−log Σ min(p, q), where Σ min(p, q) is the acceptance rate of token rejection."""
    cross_entropy: Weight = 0.0
    """Cross entropy on the data's tokens."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Divides the logits of both sides in every term but ``cross_entropy``."""
    jsd_beta: Annotated[float, Field(gt=0, lt=1)] = 0.5

    @property
    def mix(self) -> dict[Term, float]:
        """The terms on the logits with a weight above 0."""
        return {term: getattr(self, term) for term in LOGIT_TERMS if getattr(self, term) > 0}

    @property
    def soft(self) -> bool:
        """True if a term on the logits needs the target's distribution."""
        return not self.mix.keys() <= {"cross_entropy"}

    @model_validator(mode="after")
    def _a_term_has_a_weight(self) -> "LossSection":
        if not self.mix:
            raise ValueError("the loss weighs every term 0: give one of them a weight, such as forward_kl=1")
        return self


LOGIT_TERMS: tuple[Term, ...] = get_args(Term)


def default_term(term: Term) -> BeforeValidator:
    """Return the annotation of a `LossSection` field: a section that names no term gets weight 1 for ``term``.

    The default is written into the section, so that a card says what was trained.
    """

    def with_default(given: Any) -> Any:
        if isinstance(given, dict) and not given.keys() & {*LOGIT_TERMS}:
            return {**given, term: 1.0}
        return given

    return BeforeValidator(with_default)

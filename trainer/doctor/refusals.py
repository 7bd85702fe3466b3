"""Problems of the errors that loading raises: their own words, split into what was found and what to do."""

import re
from collections.abc import Callable

from decoding.measure.markdown import one_line
from decoding.model.loading import UNREADABLE, reason
from trainer.doctor.finding import Finding, problem

_VERBS = "give|load|copy|fetch|train|export|trim|write|shorten|tell|save|set|ask|put|leave"
_REMEDY = re.compile(rf"(?P<found>.*)(?:: |; )(?P<remedy>(?:{_VERBS})\b.*)")
"""The form of this project's errors: the value, then what to do."""


def refused(check: str, error: BaseException, remedy: str) -> Finding:
    """Return the problem that an error tells of. Its own remedy, if it ends with one, is taken before ``remedy``."""
    text = one_line(reason(error))
    parts = _REMEDY.fullmatch(text)
    return problem(check, parts["found"], parts["remedy"]) if parts else problem(check, text, remedy)


def attempt(check: str, work: Callable[[], Finding], remedy: str) -> Finding:
    """Return the finding of ``work``; what it raises, as loading raises it, becomes a problem."""
    try:
        return work()
    except UNREADABLE as error:
        return refused(check, error, remedy)

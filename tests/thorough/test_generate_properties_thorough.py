"""For any prompts, drafts, ends, batches and policies, greedy texts equal plain greedy ones, and a seed determines the
text.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from scripted_drafters import HostileDrafter
from test_generate_families import LENGTH, causal_lm, plain_greedy

import decoding
from decoding.generate import DecodingConfig, Engine
from decoding.model.cache import PreallocatedCache
from decoding.text import Generation

_PACKAGE = str(Path(decoding.__file__).parent)


@contextmanager
def interrupt_at(line: int) -> Iterator[list[int]]:
    """Simulate Ctrl-C before the n-th line of the package that runs in this context; yield a function that counts the
    lines.
    """
    run = [0]

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_PACKAGE):
            return None
        if event == "line":
            run[0] += 1
            if run[0] == line:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield run
    finally:
        sys.settrace(before)


def conversation(kept: PreallocatedCache, prompt: list[int]) -> tuple[int, ...]:
    drafter = HostileDrafter(3, [*prompt, *plain_greedy("llama", tuple(prompt))])
    return Generation.of(
        list(Engine(causal_lm("llama"), drafter).steps(prompt, DecodingConfig(LENGTH), cache=kept))
    ).tokens


FIRST, SECOND, THIRD = [3, 1, 4, 1, 5, 9, 2, 6], [3, 1, 4, 1, 7, 7], [3, 1, 4, 1, 5, 9, 2, 8]


def check_interrupts(lines: Sequence[int]) -> int:
    """Interrupt the second of three turns at a line; check that the third, which continues the first, is right; return
    the number of lines.
    """
    for line in (*lines, -1):
        kept = causal_lm("llama").new_cache(4)
        conversation(kept, FIRST)
        with interrupt_at(line) as run:
            try:
                conversation(kept, SECOND)
            except KeyboardInterrupt:
                assert run[0] == line
            else:
                assert line == -1
        for prompt in (THIRD, SECOND):
            assert conversation(kept, prompt) == plain_greedy("llama", tuple(prompt))
    return run[0]


def test_an_interrupt_at_any_line_leaves_the_cache_usable() -> None:
    check_interrupts([])  # values that are computed only once are computed here
    total = check_interrupts([])
    assert total > 500
    check_interrupts(range(7, total - 100, total // 15))


def test_an_interrupt_at_any_line_of_the_very_first_call_leaves_the_cache_usable() -> None:
    """At the interrupt, only some of the cache's buffers may exist."""
    for line in range(1, 400, 23):
        kept = causal_lm("llama").new_cache(4)
        with pytest.raises(KeyboardInterrupt), interrupt_at(line):
            conversation(kept, FIRST)
        assert conversation(kept, THIRD) == plain_greedy("llama", tuple(THIRD))

"""A guide's entries against a separate computation, for any tokens."""

import math
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from gpulease.client.decode.token_guide import TokenGuide

TOKENS = st.lists(st.integers(0, 40), max_size=200)
PENALTIES = st.sampled_from([(1.0, 0.0, 0.0), (1.5, 0.0, 0.0), (1.0, 0.5, 0.0), (0.8, -0.25, 1.25)])


def never() -> None:
    raise AssertionError("a guide without a grammar is ready at once")


@given(TOKENS, TOKENS, PENALTIES, st.dictionaries(st.integers(0, 40), st.sampled_from([-8.0, 3.5])), st.integers(0, 5))
def test_entries_are_those_of_the_prompt_and_the_emitted_tokens(
    prompt: list[int], emitted: list[int], penalties: tuple[float, float, float], biases: dict[int, float], least: int
) -> None:
    repetition, presence, frequency = penalties
    guide = TokenGuide(
        prompt, repetition=repetition, presence=presence, frequency=frequency, biases=biases.items(),
        min_tokens=least, end_tokens=(3, 17),
    )  # fmt: skip
    assert guide.is_stepwise is (penalties != (1.0, 0.0, 0.0))
    for token in emitted:
        guide.accept(token, never)
        assert guide.is_ready
    counts = Counter(emitted)
    found = {int(entry["token"]): entry for entry in guide.entries}
    assert len(found) == len(guide.entries)
    for token in range(41):
        addend, divisor, subtrahend = biases.get(token, 0.0), 1.0, 0.0
        if token in (3, 17) and len(emitted) < least:
            addend = -math.inf
        if repetition != 1 and (token in prompt or token in counts):
            divisor = repetition
        if token in counts:
            subtrahend = presence + counts[token] * frequency
        if token not in found:
            assert (addend, divisor, subtrahend) == (0.0, 1.0, 0.0)
            continue
        entry = found[token]
        # Exact in f32: powers of two, and penalties that are rounded once.
        assert math.isclose(entry["divisor"], divisor, rel_tol=1e-6)
        assert (float(entry["addend"]), float(entry["subtrahend"])) == (addend, subtrahend)

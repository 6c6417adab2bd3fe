"""Pages are named by the whole history up to their end."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zrt.runtime.errors import ZrtError
from zrt.runtime.page_keys import PageKeys, check_keys

tokens = st.lists(st.integers(0, 3), max_size=40)


def keys(history: list[int], model: str = "m") -> list[int]:
    return PageKeys(model, 4).of(array("I", history))


@given(tokens, tokens)
def test_keys_agree_exactly_as_far_as_the_histories_do(a: list[int], b: list[int]) -> None:
    common = 0
    while common < min(len(a), len(b)) and a[common] == b[common]:
        common += 1
    for page, (one, other) in enumerate(zip(keys(a), keys(b), strict=False)):
        assert (one == other) == ((page + 1) * 4 <= common)


@given(tokens, tokens)
def test_a_growing_history_has_the_keys_of_the_whole(a: list[int], b: list[int]) -> None:
    growing = PageKeys("m", 4)
    assert growing.of(array("I", a)) == keys(a)
    assert growing.of(array("I", a + b)) == keys(a + b)


def test_another_model_has_other_keys() -> None:
    assert not set(keys([1] * 16)) & set(keys([1] * 16, "other"))
    assert len(keys([1] * 16)) == len(set(keys([1] * 16))) == 4
    assert keys([1, 2, 3]) == []


@pytest.mark.parametrize("history", [[1, 2, 3, 4], [1, 2, 1]], ids=["too many", "one twice"])
def test_keys_that_no_history_has_are_refused(history: list[int]) -> None:
    check_keys([1, 2, 3], 3)
    with pytest.raises(ZrtError) as raised:
        check_keys(history, 3)
    assert raised.value.kind == "bad_request"

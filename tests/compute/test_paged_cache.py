"""KV pages of a device: shared in place by sessions of an equal prefix, copied before they are
written, never lost."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny_models import TINY

from zrt.runtime.compute.kv.paged_cache import PagedKVCache
from zrt.runtime.errors import ZrtError
from zrt.runtime.models.architecture.spec import spec_from_config

PAGES = 12
KEYS = st.sampled_from("abcd")
NAMES = st.sampled_from([(), (1,), (1, 2), (1, 2, 3), (1, 7), (9, 2)])
OPERATIONS = st.one_of(
    st.tuples(st.just("open"), KEYS, NAMES),
    st.tuples(st.just("write"), KEYS, st.integers(1, 70)),
    st.tuples(st.just("rewind"), KEYS, st.integers(0, 70)),
    st.tuples(st.just("close"), KEYS, NAMES),
)


def make() -> PagedKVCache:
    spec = spec_from_config({"model_type": "llama", "architectures": ["LlamaForCausalLM"], **TINY})
    page = 16 * 2 * 2 * 2 * 16 * 4
    return PagedKVCache(spec, (0, 1), dtype=torch.float32, device="cpu", budget=PAGES * page, context=128, sessions=4)


def write(cache: PagedKVCache, key: str, upto: int, number: float) -> None:
    start = cache.have(key)
    cache.reserve(key, upto)
    slots = cache.slots(key, start, upto - start)
    cache.pool.view(2, 2, -1, 2, 16)[:, :, torch.from_numpy(slots)] = number
    cache.commit(key, upto)


def read(cache: PagedKVCache, key: str) -> list[float]:
    slots = cache.slots(key, 0, cache.have(key))
    return cache.pool.view(2, 2, -1, 2, 16)[0, 0, torch.from_numpy(slots), 0, 0].tolist()


def test_an_equal_prefix_is_shared_in_place() -> None:
    cache = make()
    cache.open("a", [1, 2])
    write(cache, "a", 40, 1.0)
    cache.open("b", [1, 2, 3])
    assert cache.have("b") == 32
    assert cache.table("b").tolist() == cache.table("a")[:2].tolist()


def test_a_shared_page_is_copied_before_it_is_written() -> None:
    cache = make()
    cache.open("a", [1, 2])
    write(cache, "a", 32, 1.0)
    cache.open("b", [1, 2])
    cache.rewind("b", 20)
    write(cache, "b", 32, 2.0)
    assert read(cache, "a") == [1.0] * 32
    assert read(cache, "b") == [1.0] * 20 + [2.0] * 12


def test_what_cannot_be_is_refused() -> None:
    cache = make()
    cache.open("a")
    with pytest.raises(ZrtError, match="context") as caught:
        cache.reserve("a", 129)
    assert caught.value.kind == "context_exceeded"


@settings(deadline=None)
@given(st.lists(OPERATIONS, max_size=30))
def test_every_page_is_free_or_has_its_owners_counted(operations) -> None:
    cache, histories = make(), {}
    for number, (operation, key, what) in enumerate(operations):
        known = key in cache
        if operation == "open" and not known:
            cache.open(key, what)
            histories[key] = read(cache, key)
        elif operation == "write" and known:
            have = cache.have(key)
            try:
                write(cache, key, have + what, number)
                histories[key] += [number] * what
            except ZrtError as error:
                assert error.kind in ("kv_full", "context_exceeded")
        elif operation == "rewind" and known:
            cache.rewind(key, what)
            del histories[key][what:]
        elif operation == "close":
            cache.close(key, what)
            histories.pop(key, None)
        for other, history in histories.items():
            assert read(cache, other) == history
        rows = zip(cache._tables.tolist(), cache._counts, strict=True)
        held = Counter(page for table, count in rows for page in table[:count])
        assert [held[page] for page in range(PAGES)] == cache._owners
        assert sorted([*held, *cache._free]) == list(range(PAGES))

"""KV memory: pages are counted exactly, and memory that is not used is not taken."""

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zrt.runtime.compute.kv.page_pool import PagePool
from zrt.runtime.compute.kv.slab_cache import SlabKVCache
from zrt.runtime.errors import ZrtError
from zrt.runtime.models.architecture.spec import ModelSpec, spec_from_config
from zrt.runtime.models.checkpoint.layout import kv_token_bytes

KEYS = st.sampled_from("abcd")
OPERATIONS = st.one_of(
    st.tuples(st.just("open"), KEYS, st.just(0)),
    st.tuples(st.just("reserve"), KEYS, st.integers(0, 120)),
    st.tuples(st.just("commit"), KEYS, st.integers(0, 120)),
    st.tuples(st.just("rewind"), KEYS, st.integers(0, 120)),
    st.tuples(st.just("close"), KEYS, st.just(0)),
)


def _fails(kind: str, call: Callable[[str, int], None], key: str, n: int) -> None:
    with pytest.raises(ZrtError) as caught:
        call(key, n)
    assert caught.value.kind == kind


@given(st.lists(OPERATIONS, max_size=40))
def test_free_cached_and_used_always_make_the_total(operations) -> None:
    pool = PagePool(total=10, page_tokens=16, page_bytes=64, sessions=8)
    owned: dict[str, int] = {}  # what each session should own, in pages
    have: dict[str, int] = {}
    for operation, key, n in operations:
        known, pages = key in owned, -(-n // 16)
        match operation:
            case "open" if known:
                pass
            case "open":
                pool.open(key)
                owned.setdefault(key, 0)
                have.setdefault(key, 0)
            case "close":
                pool.close(key)
                owned.pop(key, None)
                have.pop(key, None)
            case _ if not known:
                _fails("unknown_session", getattr(pool, operation), key, n)
            case "reserve" if pages - owned[key] > 10 - sum(owned.values()):
                _fails("kv_full", pool.reserve, key, n)
            case "reserve":
                pool.reserve(key, n)
                owned[key] = max(owned[key], pages)
            case "commit" if not have[key] <= n <= owned[key] * 16:
                _fails("internal", pool.commit, key, n)
            case "commit":
                pool.commit(key, n)
                have[key] = n
            case "rewind":
                pool.rewind(key, n)
                have[key] = min(have[key], n)
                owned[key] = -(-have[key] // 16)
        stats = pool.stats()
        assert stats.free + stats.cached + stats.used == stats.total == 10
        assert stats.used == sum(owned.values())
        assert {key: pool.have(key) for key in owned} == have


def test_a_refused_reservation_tells_the_numbers_and_changes_nothing() -> None:
    pool = PagePool(total=10, page_tokens=16, page_bytes=64, sessions=8)
    pool.open("a")
    pool.open("b")
    pool.reserve("a", 100)
    before = pool.stats()
    with pytest.raises(ZrtError, match="needs 4 more KV pages of 16 tokens to hold 50 tokens; 3 of 10 are free"):
        pool.reserve("b", 50)
    assert pool.stats() == before


def _spec(**config: object) -> ModelSpec:
    sizes = {
        "model_type": "llama",
        "vocab_size": 100,
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
    }
    return spec_from_config(sizes | config)


def _cache(
    *, budget: int = 1 << 30, context: int = 4096, sessions: int = 4, dtype: torch.dtype = torch.float32
) -> SlabKVCache:
    return SlabKVCache(_spec(), (1, 2), dtype=dtype, budget=budget, context=context, sessions=sessions)


@pytest.mark.parametrize(("dtype", "name"), [(torch.float32, "float32"), (torch.bfloat16, "bfloat16")])
def test_the_budget_is_cut_into_pages_of_16_tokens_of_all_blocks_of_the_shard(dtype, name) -> None:
    stats = _cache(budget=1 << 20, dtype=dtype).stats()
    assert stats.page_bytes == 16 * 2 * kv_token_bytes(_spec(), name)
    assert stats.total == (1 << 20) // stats.page_bytes
    assert stats.free == stats.total


def test_a_budget_below_one_page_is_refused() -> None:
    with pytest.raises(ZrtError, match="KV budget of 1000 bytes") as caught:
        _cache(budget=1000)
    assert caught.value.kind == "insufficient_memory"


def test_more_address_space_than_there_is_is_refused() -> None:
    with pytest.raises(ZrtError, match="fewer sessions or less context") as caught:
        _cache(context=1 << 30, sessions=1 << 20)
    assert caught.value.kind == "insufficient_memory"


def test_sessions_beyond_the_rows_are_refused_until_one_closes() -> None:
    cache = _cache(sessions=2)
    cache.open("a")
    cache.open("b")
    cache.open("a")
    with pytest.raises(ZrtError) as caught:
        cache.open("c")
    assert caught.value.kind == "overloaded"
    cache.close("a")
    cache.close("a")
    cache.open("c")
    assert ("a" in cache, "c" in cache, len(cache)) == (False, True, 2)


def test_the_context_bounds_a_session() -> None:
    cache = _cache(context=100)
    cache.open("a")
    cache.reserve("a", 100)
    with pytest.raises(ZrtError, match="the context is 100") as caught:
        cache.reserve("a", 101)
    assert caught.value.kind == "context_exceeded"


@pytest.mark.parametrize(
    "call", [lambda cache: cache.have("x"), lambda cache: cache.rewind("x", 0), lambda cache: cache.reserve("x", 1)]
)
def test_a_session_that_is_not_open_is_unknown(call) -> None:
    with pytest.raises(ZrtError) as caught:
        call(_cache())
    assert caught.value.kind == "unknown_session"


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@pytest.mark.parametrize(
    "forget", [lambda cache: cache.close("a"), lambda cache: cache.rewind("a", 0)], ids=["close", "rewind to 0"]
)
def test_memory_is_taken_when_it_is_written_and_given_back_when_it_is_forgotten(forget) -> None:
    gc.collect()
    before = _resident()
    cache = _cache(context=16384, sessions=64)  # 64 MiB a session, 4 GiB of address space
    cache.open("a")
    assert _resident() - before < 8 << 20
    cache.reserve("a", 16384)
    cache.commit("a", 16384)
    cache.slab[cache.row("a")].fill_(1.0)
    assert _resident() - before > 56 << 20
    forget(cache)
    assert _resident() - before < 8 << 20


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(1, 70))
def test_rows_of_any_context_do_not_overlap(sessions, context) -> None:
    cache = _cache(context=context, sessions=sessions)
    for row in range(len(cache.slab)):
        cache.slab[row].fill_(float(row))
    for row in range(len(cache.slab)):
        assert bool((cache.slab[row] == row).all())

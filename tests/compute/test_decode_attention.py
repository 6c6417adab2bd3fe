"""Attention of single tokens is what float64 says, whatever the sizes, and a step's result does not
depend on the other steps."""

import pytest
import torch
from torch import Tensor

from zrt.runtime.compute.cpu.decode_attention import DecodeAttention, DecodeStep

CONTEXT, BLOCKS, HEAD_DIM = 70, 2, 24
POSITIONS = (0, 1, 6, 7, 38, 69)


@pytest.mark.parametrize("window", [None, 1, 3, 64])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (9, 3), (7, 1)])
def test_attention_of_single_tokens_is_that_of_float64(
    heads: int, kv_heads: int, softcap: float | None, window: int | None
) -> None:
    slab, qkv = _slab(kv_heads), torch.randn(len(POSITIONS), (heads + 2 * kv_heads) * HEAD_DIM)
    before = slab.clone()
    steps, out = _steps(window), torch.empty(len(POSITIONS), heads * HEAD_DIM)
    DecodeAttention(slab, steps, qkv, out, scale=0.3, softcap=softcap)(1)
    for step in steps:
        row = qkv[step.batch_row].view(-1, HEAD_DIM)
        before[step.slab_row, 1, :, :, step.position] = row[heads:].view(2, kv_heads, HEAD_DIM)
        past = before[step.slab_row, 1, :, :, step.first : step.position + 1]
        assert (out[step.batch_row] - _exact(row[:heads], past, softcap)).abs().max() <= 2e-6
    assert torch.equal(slab, before)


def test_a_step_attends_the_same_bit_by_bit_in_any_company() -> None:
    slab, qkv = _slab(2), torch.randn(len(POSITIONS), 8 * HEAD_DIM)
    together, alone = torch.empty(2, len(POSITIONS), 4 * HEAD_DIM)
    DecodeAttention(slab, _steps(None), qkv, together, scale=0.2, softcap=None)(0)
    for step in _steps(None):
        DecodeAttention(slab, [step], qkv, alone, scale=0.2, softcap=None)(0)
    assert torch.equal(alone, together)


def test_scores_far_apart_do_not_overflow() -> None:
    slab, qkv = _slab(1), torch.randn(len(POSITIONS), 3 * HEAD_DIM) * 100
    out = torch.empty(len(POSITIONS), HEAD_DIM)
    DecodeAttention(slab, _steps(None), qkv, out, scale=1.0, softcap=None)(0)
    for step in _steps(None):
        past = slab[step.slab_row, 0, :, :, : step.position + 1]
        wanted = _exact(qkv[step.batch_row].view(3, HEAD_DIM)[:1], past, None, scale=1.0)
        assert torch.allclose(out[step.batch_row].double(), wanted, rtol=1e-3, atol=1e-3)


def _slab(kv_heads: int) -> Tensor:
    """Rows that do not follow one another closely, as in the cache."""
    numbers = BLOCKS * 2 * kv_heads * CONTEXT * HEAD_DIM
    return torch.randn(8, numbers + 5)[:, :numbers].view(8, BLOCKS, 2, kv_heads, CONTEXT, HEAD_DIM)


def _steps(window: int | None) -> list[DecodeStep]:
    return [
        DecodeStep(7 - row, position, 0 if window is None else max(0, position + 1 - window), row)
        for row, position in enumerate(POSITIONS)
    ]


def _exact(queries: Tensor, past: Tensor, softcap: float | None, scale: float = 0.3) -> Tensor:
    """`queries` [heads, head_dim] over `past` [2, kv heads, tokens, head_dim], in float64: [heads x
    head_dim]."""
    keys, values = past.double().repeat_interleave(len(queries) // past.shape[1], dim=1)
    scores = torch.einsum("hd,htd->ht", queries.double(), keys) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    return torch.einsum("ht,htd->hd", scores.softmax(-1), values).flatten()

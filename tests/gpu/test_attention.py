"""The attention of batches in which some sessions have several tokens and others one, from pages in
any order, beside float64."""

import math

import pytest
import torch
from torch import Tensor

from zrt.runtime.compute.decoder.ops import AttentionSpec
from zrt.runtime.models.architecture.spec import spec_from_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

PAGE, PAGES = 16, 400
CONFIG = {"model_type": "llama", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
CONFIG |= {"max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "hidden_act": "silu"}
HEADS = {"four of one": (8, 2, 64), "three of one": (6, 2, 80), "all of one": (16, 1, 128), "each its own": (4, 4, 256)}
SEES = {"all": (None, None), "a window": (100, None), "a capped window": (33, 5.0)}
STEPS = {
    "short ones after long histories": [(3000, 20), (0, 33), (511, 1), (63, 65)],
    "long ones": [(0, 300), (1000, 1), (17, 400), (0, 1)],
    "one alone": [(700, 130)],
    "a long one alone": [(65, 1100)],
    "many": [(7 * index, 2 + index) for index in range(16)] + [(5 * index, 1) for index in range(9)],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("sees", SEES.values(), ids=SEES)
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_rows_of_one_and_of_several_tokens_see_their_history(
    heads: tuple[int, int, int], sees: tuple[int | None, float | None], steps: list[tuple[int, int]], dtype: torch.dtype
) -> None:
    from zrt.runtime.compute.cuda.attention_launch import PagedAttention, query_tile

    count, kv_heads, width = heads
    window, softcap = sees
    scale, device = 1.5 / math.sqrt(width), torch.device("cuda")
    spec = spec_from_config(CONFIG | {"num_attention_heads": count, "num_key_value_heads": kv_heads, "head_dim": width})
    draw = torch.Generator(device).manual_seed(0)
    rows, padding = sum(n for _, n in steps), 3
    qkv = torch.randn(rows + padding, (count + 2 * kv_heads) * width, generator=draw, device=device).to(dtype)
    kv = [torch.randn(PAGES, PAGE, kv_heads, width, generator=draw, device=device).to(dtype) for _ in range(2)]
    pages = torch.stack([torch.randperm(PAGES, generator=draw, device=device) for _ in steps]).int()
    out = torch.full((rows + padding, count * width), 7.0, device=device, dtype=dtype)
    tiles, prompts, singles, row = [], [], [], 0
    for index, (first, n) in enumerate(steps):
        if n == 1:
            singles.append((row, first + 1, index))
        else:
            size = query_tile(dtype)
            tiles += [(row + at, min(size, n - at), first + at, index) for at in range(0, n, size)]
            prompts += range(row, row + n)
        row += n
    ours = PagedAttention(spec, AttentionSpec((window,), scale, softcap), PAGE, device)

    def there(numbers: object) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    if singles:
        at, lengths, whose = there(singles).unbind(1)
        ours.attend(0, qkv, kv, pages[whose.long()], lengths.contiguous(), at.contiguous(), out, mixed=True)
    empty = [(0, 0, 1 << 30, 9)] * 2  # what is left of another batch
    ours.attend_prompts(0, qkv, kv, pages, there(tiles + empty), there(prompts + prompts[:1] * 5), out)
    row = 0
    for index, (first, n) in enumerate(steps):
        wanted = _attended(qkv[row : row + n], kv, pages[index], first, heads, scale, window, softcap)
        close = 3e-5 if dtype == torch.float32 else 2e-2
        assert (out[row : row + n] - wanted).abs().max() <= close, steps[index]
        row += n
    assert (out[rows:] == 7).all()


def _attended(
    qkv: Tensor,
    kv: list[Tensor],
    pages: Tensor,
    first: int,
    heads: tuple[int, int, int],
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """float64 [rows, heads x head_dim]."""
    count, kv_heads, width = heads
    n, total = len(qkv), first + len(qkv)
    q = qkv[:, : count * width].view(n, count, width).double()
    keys, values = (
        part[pages.long()].flatten(0, 1)[:total].double().repeat_interleave(count // kv_heads, dim=1) for part in kv
    )
    scores = torch.einsum("nhd,thd->hnt", q, keys) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    position, token = torch.arange(first, total, device=q.device)[:, None], torch.arange(total, device=q.device)
    hidden = token > position
    if window is not None:
        hidden |= token <= position - window
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
    return torch.einsum("hnt,thd->nhd", weights, values).reshape(n, count * width)

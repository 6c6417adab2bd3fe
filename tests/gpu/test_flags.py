"""What a GPU leaves in memory that processes map, and what it takes from there."""

from collections.abc import Iterator

import pytest
import torch

from zrt.runtime.compute.shared_rows.channel import Inlet, Outlet

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

PLACE_BYTES = 1 << 22


@pytest.fixture(scope="module")
def outlet() -> Iterator[Outlet]:
    from zrt.runtime.compute.cuda import stream_flags

    made = Outlet(PLACE_BYTES, stream_flags)
    made.prepare()
    yield made
    made.close()


@pytest.mark.parametrize(
    "shape", [(1, 4096), (16, 4096), (5, 33), (3, 2), (7,), (1,), (300, 1000), (256, 2048), (900, 4096)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64], ids=str)
def test_rows_arrive_as_they_were(shape: tuple[int, ...], dtype: torch.dtype, outlet: Outlet) -> None:
    from zrt.runtime.compute.cuda import stream_flags

    rows = torch.arange(torch.Size(shape).numel(), device="cuda").reshape(shape).to(dtype)
    if rows.numel() * rows.element_size() > PLACE_BYTES:
        assert outlet.put(rows) is None
        return
    handed = outlet.put(rows)
    assert handed is not None
    inlet = Inlet(handed, stream_flags)
    void = torch.ones(2, dtype=torch.int32, device="cuda")
    for first in sorted({0, 1, shape[0] - 1, shape[0] // 2} - {shape[0]}):
        to = torch.full((shape[0] - first + 1, *shape[1:]), 3, dtype=dtype, device="cuda")
        (taken,) = inlet.rows(handed, [(first, shape[0] - first)], shape[1:], dtype)
        taken.copy_to(to[:-1], void[1:])
        assert torch.equal(to[:-1], rows[first:])
        assert torch.equal(to[-1:], torch.full_like(to[-1:], 3))
        assert void.tolist() == [1, 0]
    inlet.close()


@pytest.mark.parametrize("voids", [[0], [1], [0, 0, 0], [0, 0, -1], [0, 1, 0, 1], [0] * 257, [0] * 256 + [1]])
def test_void_rows_are_called_void(voids: list[int], outlet: Outlet) -> None:
    from zrt.runtime.compute.cuda import stream_flags

    rows = torch.ones(2, 64, device="cuda")
    handed = outlet.put(rows, torch.tensor(voids, dtype=torch.int32, device="cuda"))
    assert handed is not None
    inlet = Inlet(handed, stream_flags)
    void, to = torch.full((1,), 7, dtype=torch.int32, device="cuda"), torch.empty_like(rows)
    (taken,) = inlet.rows(handed, [(0, 2)], (64,), torch.float32)
    taken.copy_to(to, void)
    assert bool(void.item()) == taken.void == any(voids)
    del taken
    inlet.close()

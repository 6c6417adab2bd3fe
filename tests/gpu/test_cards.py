"""Cards that are not here: every kernel is compiled for them; and those that lack dependent
launch."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu
FOLDER = Path(__file__).parent
KERNELS = """attend attend_tile best_of_row best_of_tile choose collect combine gate_rows leave narrow norm_rows one_row_product place_heads settle
take weigh"""
CARDS = {
    "Ampere": (80, 164, 163),
    "Ampere, of desks": (86, 100, 99),
    "Hopper": (90, 228, 227),
    "Blackwell, of desks": (120, 100, 99),
}
"""Compute capability, and KiB of shared memory: of a multiprocessor, and what a block may have.
https://docs.nvidia.com/cuda/cuda-c-programming-guide/#compute-capabilities"""


@pytest.mark.timeout(200)
@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)
def test_every_kernel_is_compiled_for_it_and_has_room(card: tuple[int, int, int]) -> None:
    pytest.importorskip("triton", reason="comes with torch for CUDA")
    words = [sys.executable, str(FOLDER / "compile_for.py"), *map(str, card)]
    said = subprocess.run(words, capture_output=True, text=True, timeout=190, check=False)
    assert said.returncode == 0, said.stderr[-2000:]
    *small, last = said.stdout.splitlines()
    assert not small
    assert last.split(": ")[1].split() == KERNELS.split()


WITHOUT = """
import sys
import pytest
import triton.language as tl
from zrt.runtime.compute.cuda.kernels.dense import dependent_launch
dependent_launch.DEPENDENT, dependent_launch._DEPENDENT = False, tl.constexpr(False)
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""


@pytest.mark.timeout(200)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_without_dependent_launch_the_same_is_computed() -> None:
    tests = [str(FOLDER / "test_decoder.py"), "-k", "many_kinds or products_of_one_row or begun_ahead"]
    said = subprocess.run(
        [sys.executable, "-c", WITHOUT, *tests], capture_output=True, text=True, timeout=190, check=False
    )
    assert said.returncode == 0, said.stdout[-2000:]

"""Compile every kernel for a card that need not be here. Words: CAPABILITY (as 86), KiB of a
multiprocessor's shared memory, KiB a block may have.

Needs Triton and no GPU. Prints each kernel that takes more than a block may have, and how many were
compiled.
"""

import sys
from types import SimpleNamespace

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

capability, multiprocessor, block = (int(word) for word in sys.argv[1:])
CARD = SimpleNamespace(
    get_current_target=lambda: GPUTarget("cuda", capability, 32),
    get_current_device=lambda: 0,
    get_current_stream=lambda device: 0,
)
PROPERTIES = SimpleNamespace(shared_memory_per_multiprocessor=multiprocessor << 10)
torch.cuda.device_count = lambda: 1
torch.cuda.get_device_capability = lambda device=None: divmod(capability, 10)
torch.cuda.get_device_properties = lambda device=None: PROPERTIES
driver.set_active(CARD)
compiled: dict[str, tuple[str, int]] = {}
launch = JITFunction.run


def compile_only(kernel, *args, grid, warmup, **options):
    made = launch(kernel, *args, grid=grid, warmup=True, **options)
    compiled[made.hash] = kernel.__name__, made.metadata.shared


JITFunction.run = compile_only

from zrt.runtime.compute.cuda import stream_flags  # noqa: E402  what they import asks what cards there are
from zrt.runtime.compute.cuda.attention_launch import PagedAttention  # noqa: E402
from zrt.runtime.compute.cuda.batch_sampler import best, draw  # noqa: E402
from zrt.runtime.compute.cuda.dense_launch import gate_rows, norm_rows, one_row_product  # noqa: E402
from zrt.runtime.compute.cuda.tuning import TRIED  # noqa: E402
from zrt.runtime.compute.decoder.ops import AttentionSpec  # noqa: E402

CPU = torch.device("cpu")


def attention(dtype: torch.dtype, head_dim: int, window: int | None, softcap: float | None) -> None:
    spec = SimpleNamespace(num_heads=8, num_kv_heads=2, head_dim=head_dim, rope_dim=head_dim)
    heads = PagedAttention(spec, AttentionSpec((window,), 0.1, softcap), 16, CPU)
    kv = [torch.empty(16, 16, 2, head_dim, dtype=dtype) for _ in range(2)]
    norm = torch.empty(10, head_dim, dtype=dtype)
    for rows in (1, 8, 64, 512):
        qkv, out = torch.empty(rows, 12 * head_dim, dtype=dtype), torch.empty(rows, 8 * head_dim, dtype=dtype)
        angles = (torch.empty(rows, head_dim, dtype=dtype),) * 2
        heads.place(qkv, norm, 1e-6, angles, torch.empty(rows, dtype=torch.int64), kv)
        tables, numbers = torch.empty(rows, 16, dtype=torch.int32), torch.empty(rows, dtype=torch.int32)
        for mixed in (False, True):
            heads.attend(0, qkv, kv, tables, numbers, numbers, out, mixed=mixed)
        heads.attend_prompts(0, qkv, kv, tables, torch.empty(9, 4, dtype=torch.int32), numbers, out)


def products(dtype: torch.dtype) -> None:
    x, norm = torch.empty(1, 4096, dtype=dtype), torch.empty(4096, dtype=dtype)
    weight = torch.empty(2048, 4096, dtype=dtype)
    for shape in TRIED:
        for gate in (False, True):
            out = torch.empty(1, 1024 if gate else 2048, dtype=dtype)
            one_row_product(x, weight, out, norm=norm, eps=1e-6, gate=gate, shape=shape)
            one_row_product(x, weight, out, gate=gate, add=not gate, shape=shape)
    for width in (1024, 4096):
        norm_rows(weight[:, :width], norm[:width], 1e-6, weight[:, :width])
    for is_silu in (False, True):
        gate_rows(weight, is_silu)


for kind in (torch.bfloat16, torch.float32):
    products(kind)
    for width in (64, 128, 256):
        attention(kind, width, None, None)
    attention(kind, 128, 100, 50.0)
logits = torch.empty(4, 151936)
best(logits)
draw(logits, torch.empty(4, 5, dtype=torch.float64))
word = torch.empty(1, dtype=torch.int32)
stream_flags.leave(logits[0, :1024], logits[1, :1024], None, word)
stream_flags.take(logits[0, :1024], logits[1, :1024], word, word, word)
for name, shared in compiled.values():
    if shared > block << 10:
        print(f"{name} takes {shared} bytes of shared memory")
names = {name for name, _ in compiled.values()}
print(f"{len(names)} kernels, {len(compiled)} ways: {' '.join(sorted(names))}")

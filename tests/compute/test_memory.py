"""A process holds its shard and little else, and reads its shard's bytes and no others, also while
it loads."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

# Loads a shard, on two cores, and prints, in bytes: the shard, the greatest resident size above
# that of the bare process, the one at the end, and what was read.
PROBE = """
import json, os, pathlib, sys
import torch
from zrt.runtime.compute.decoder.shard import Shard
from zrt.runtime.models.architecture.spec import read_spec
from zrt.runtime.compute.weight_sources import RandomCheckpoint, open_checkpoint

def status(file, field):
    line = next(line for line in pathlib.Path(file).read_text().splitlines() if line.startswith(field))
    return int(line.split()[1])

folder, source, first, last, dtype = sys.argv[1:]
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
spec = read_spec(pathlib.Path(folder))
torch.ones(64, 64) @ torch.ones(64, 64)
pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
bare, read = status("/proc/self/status", "VmHWM:") * 1024, status("/proc/self/io", "rchar:")
checkpoint = RandomCheckpoint(spec) if source == "random" else open_checkpoint(pathlib.Path(folder))
shard = Shard.load(spec, checkpoint, (int(first), int(last)), dtype=getattr(torch, dtype))
peak, kept = (status("/proc/self/status", field) * 1024 - bare for field in ("VmHWM:", "VmRSS:"))
read = status("/proc/self/io", "rchar:") - read
print(json.dumps({"shard": shard.nbytes, "peak": peak, "kept": kept, "read": read}))
"""
WIDE = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 12, "vocab_size": 16_000}


def _probe(folder: Path, source: str, blocks: tuple[int, int], dtype: str) -> dict[str, int]:
    command = [sys.executable, "-c", PROBE, folder, source, *map(str, blocks), dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    return json.loads(done.stdout)


@pytest.mark.matrix("stored")
@pytest.mark.parametrize("blocks", [(0, 5), (6, 11)], ids=["first half", "second half"])
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_resident_memory_stays_within_1_3_shards_while_loading_float32(make_model, stored, blocks) -> None:
    seen = _probe(make_model("llama", tied=True, dtype=stored, **WIDE), "files", blocks, "float32")
    assert seen["shard"] > 100 << 20
    assert seen["peak"] <= 1.3 * seen["shard"]


def test_resident_memory_stays_within_1_3_shards_while_drawing_random_weights(make_model) -> None:
    """And what the threads that draw needed besides the shard is given back."""
    seen = _probe(make_model("llama", tied=True, dtype="bfloat16", **WIDE), "random", (0, 5), "float32")
    assert seen["peak"] <= 1.3 * seen["shard"]
    libraries_and_allocator = 16 << 20
    assert seen["kept"] <= seen["shard"] + libraries_and_allocator


@pytest.mark.parametrize("blocks", [(0, 0), (4, 7)])
def test_only_the_bytes_of_the_shard_are_read(make_model, blocks) -> None:
    seen = _probe(make_model("llama", tied=True, dtype="bfloat16", **WIDE), "files", blocks, "bfloat16")
    header_and_config = 64 << 10
    assert seen["shard"] <= seen["read"] <= seen["shard"] + header_and_config

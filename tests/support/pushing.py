"""A master that only pushes the layers of a folder to the worker at an endpoint. Prints how many
bytes it pushed, and by how many its memory grew."""

import asyncio
import json
import sys
from pathlib import Path

from zrt.actors.block_server.layer_lending.layer_setup import push
from zrt.actors.block_server.layer_lending.lent_worker import LentWorker
from zrt.actors.block_server.layer_lending.offer import LayerFile, Offer
from zrt.runtime.actor.actor import Actor
from zrt.runtime.messages.control import Address
from zrt.runtime.messages.layers import (
    LayerAssignment,
    LayerAssignmentAck,
    LayersPrepared,
    PrepareLayers,
    layer_name,
)
from zrt.runtime.models.architecture.spec import read_spec
from zrt.runtime.models.checkpoint.index import CheckpointIndex


def resident(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


async def main(folder: Path, endpoint: str, incarnation: int) -> None:
    actor = Actor("master")
    await actor.start()
    worker = LentWorker(actor, Address("attic", incarnation, endpoint))
    spec, config = read_spec(folder), (folder / "config.json").read_text()
    layers = range(1, spec.num_blocks - 1)
    before = resident("VmRSS")
    source, spec = CheckpointIndex.open(folder).matched(spec)
    offer = await asyncio.to_thread(Offer, [LayerFile.of(source, spec, layer) for layer in layers], config)
    await worker.ask(PrepareLayers(config, "float32", 1 << 20, 64, 1), LayersPrepared, 60)
    names = [layer_name(layer) for layer in layers]
    ack = await worker.ask(LayerAssignment(names, offer.model_hash), LayerAssignmentAck, 60)
    assert ack.needs_data
    await push(worker, offer, lambda held, sent: None)
    pushed = sum(file.size for file in offer.files)
    print(json.dumps({"pushed": pushed, "grew": resident("VmHWM") - before}))
    await actor.stop()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))

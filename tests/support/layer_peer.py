"""A master written from the documented messages alone, without zrt: pyzmq, MessagePack, and the
safetensors format by hand.

Arguments: ENDPOINT MODEL CONTEXT. Drives a layer worker through Hello, its set-up with layers 1 to
4, SingleOp, Batch and Goodbye; prints one JSON object.
"""

import hashlib
import json
import struct
import sys
from pathlib import Path
from typing import Any

import msgspec
import zmq

LAYERS = (1, 2, 3, 4)
HIDDEN = 64
F32 = 5


def file_of(model: Path, layer: int) -> bytes:
    """Return a layer's tensors as a safetensors file of their own."""
    data = (model / "model.safetensors").read_bytes()
    end = 8 + struct.unpack("<Q", data[:8])[0]
    table = json.loads(data[8:end])
    head: dict[str, Any] = {}
    body = b""
    for name, entry in table.items():
        if name.startswith(f"model.layers.{layer}."):
            first, last = entry["data_offsets"]
            head[name] = entry | {"data_offsets": [len(body), len(body) + last - first]}
            body += data[end + first : end + last]
    text = json.dumps(head).encode()
    return struct.pack("<Q", len(text)) + text + body


def main() -> None:
    endpoint, folder, context = sys.argv[1:]
    model = Path(folder)
    socket = zmq.Context().socket(zmq.DEALER)
    socket.linger = 0
    socket.rcvtimeo = 20_000
    socket.connect(endpoint)
    said: dict[str, Any] = {}

    def ask(kind: str, **fields: object) -> dict[str, Any]:
        socket.send(msgspec.msgpack.encode({"type": kind, **fields}))
        answer: dict[str, Any] = msgspec.msgpack.decode(socket.recv())
        said.setdefault(kind, answer["type"])
        return answer

    def rows(values: list[float]) -> dict[str, object]:
        shape = [1, len(values) // HIDDEN, HIDDEN]
        return {"data": struct.pack(f"<{len(values)}f", *values), "dtype": F32, "shape": shape}

    def numbers(tensor: dict[str, Any]) -> list[float]:
        return list(struct.unpack(f"<{len(tensor['data']) // 4}f", tensor["data"]))

    names = [f"model.layers.{layer}" for layer in LAYERS]
    info = ask("Hello")
    config = (model / "config.json").read_text()
    sizes = {"kv_bytes": 1 << 22, "context": int(context), "sessions": 2}
    ask("PrepareLayers", config_json=config, dtype="float32", single=True, **sizes)
    files = {f"layer-{layer:05d}.safetensors": file_of(model, layer) for layer in LAYERS}
    listed = [
        {"name": name, "size": len(data), "pieces": [hashlib.sha256(data).hexdigest()]} for name, data in files.items()
    ]
    manifest = json.dumps({"config": hashlib.sha256(config.encode()).hexdigest(), "files": listed}).encode()
    model_hash = hashlib.sha256(manifest).hexdigest()
    needs_data = ask("LayerAssignment", layers=names, model_hash=model_hash)["needs_data"]
    for name, data in {"manifest.json": manifest, **files}.items():
        ask("ModelDataChunk", filename=name, offset=0, total_size=len(data), data=data)
    ask("ModelDataDone")

    prompt = [((7 * place) % 23 - 11) / 8 for place in range(5 * HIDDEN)]
    token = prompt[:HIDDEN]
    batch = numbers(
        ask("Batch", x=rows(prompt), batch=[[name, 0, layer] for name, layer in zip(names, LAYERS, strict=True)])
    )
    one = token
    for name, layer in zip(names, LAYERS, strict=True):
        one = numbers(ask("SingleOp", layer_name=name, x=rows(one), index_pos=5, block_idx=layer))
    goodbye = ask("Goodbye")
    gap = ask("SingleOp", layer_name=names[0], x=rows(token), index_pos=6, block_idx=1)
    print(
        json.dumps(
            {
                "info": info,
                "said": said,
                "needs_data": needs_data,
                "prompt": prompt,
                "batch": batch,
                "single": one,
                "goodbye": goodbye["dtype"],
                "gap": gap["message"],
                "zrt": [name for name in sys.modules if name.partition(".")[0] == "zrt"],
            }
        )
    )


if __name__ == "__main__":
    main()

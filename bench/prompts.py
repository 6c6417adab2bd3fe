"""A short question beside long texts: when its first token comes, alone and while they wait.

    python bench/prompts.py [--model demo|random] [--stages N] [--questions N]

One text of 8 MB and 40 of 0.5 MB arrive at once, and "hi" is asked again and again from then on,
by another client. With `demo` the texts are far beyond the context; `random` is a model of tiny
random weights with the demo's tokenizer, whose context of 4 million tokens could hold them.

Prints one JSON object.
"""

import argparse
import asyncio
import json
import random
import shutil
import statistics
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
from sides import cluster, parent, servers

from zrt.runtime import Client
from zrt.runtime.client.stream import Stream
from zrt.runtime.errors import ZrtError
from zrt.runtime.messages.client import Accepted, Piece
from zrt.runtime.models.fetch.resolve import resolve

DEMO = "smollm2-135m"
CONTEXT = 4_000_000
SIZES = [8_000_000] + [500_000] * 40
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
LOOK_S = 0.05


def random_model(folder: Path) -> Path:
    """Make a model with a long context and next to no weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        eos_token_id=2,
        bos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    source = resolve(DEMO)
    for name in TOKENIZER:
        if (source / name).exists():
            shutil.copy(source / name, folder)
    return folder


def texts(folder: Path) -> list[str]:
    """Texts of words of the vocabulary, a token each, the same in every run."""
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    words = sorted(token[1:] for token in vocabulary if token[0] == "Ġ" and token[1:].isascii() and token[1:].islower())
    chosen = random.Random(1)
    return [" ".join(chosen.choices(words, k=size // 4))[:size] for size in SIZES]


async def first_token(client: Client, text: str) -> float:
    """Return the milliseconds until the first token."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    stream = client.generate(text, max_tokens=1, temperature=0.0)
    async for _ in stream:
        return 1e3 * (loop.time() - began)
    raise RuntimeError("no token came")


class Long:
    """One long text on its way; `end` says what became of it."""

    def __init__(self) -> None:
        self.accepted = False
        self.end = ""

    async def run(self, stream: Stream) -> None:
        try:
            while True:
                event = await stream.next_event()
                self.accepted = self.accepted or isinstance(event, Accepted)
                if isinstance(event, Piece):
                    self.end = "answered"
                    return
        except ZrtError as error:
            self.end = error.kind


class Peak:
    """The most resident memory, in MiB, of a process and of its children."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self.own = self.children = self.own_before = self._now()

    def _now(self) -> int:
        return int(self._process.memory_info().rss >> 20)

    async def watch(self) -> None:
        self.children = 0
        while True:
            self.own = max(self.own, self._now())
            held = 0
            for child in self._process.children():
                try:
                    held += child.memory_info().rss >> 20
                except psutil.Error:
                    continue
            self.children = max(self.children, held)
            await asyncio.sleep(LOOK_S)


async def run(asked: argparse.Namespace, endpoint: str, long_texts: list[str]) -> dict[str, Any]:
    found = await servers(endpoint)
    boss = psutil.Process(parent(next(iter(found.values()))))
    (coordinator,) = [child.pid for child in boss.children() if "coordinator" in child.cmdline()]
    peak = Peak(coordinator)
    async with Client(endpoint) as client, Client(endpoint) as sender:
        alone = [await first_token(client, "hi") for _ in range(asked.questions)]
        longs = [Long() for _ in SIZES]
        watching = asyncio.create_task(peak.watch())
        loop = asyncio.get_running_loop()
        began = loop.time()
        tasks = [
            asyncio.create_task(long.run(sender.generate(text, max_tokens=4)))
            for long, text in zip(longs, long_texts, strict=True)
        ]
        beside = []
        while len(beside) < asked.questions or (
            loop.time() - began < asked.seconds and not all(one.done() for one in tasks)
        ):
            beside.append(await first_token(client, "hi"))
            await asyncio.sleep(LOOK_S)
        ended = loop.time() - began
        state = await client.status()
        for task in tasks:
            task.cancel()
        watching.cancel()
    return {
        "alone_ms": [round(statistics.median(alone), 1), round(max(alone), 1)],
        "beside_ms": [round(statistics.median(beside), 1), round(max(beside), 1)],
        "ratio_of_medians": round(statistics.median(beside) / statistics.median(alone), 2),
        "questions": len(beside),
        "seconds": round(ended, 1),
        "texts_accepted": sum(long.accepted for long in longs),
        "texts": Counter(long.end or "running" for long in longs),
        "sessions": Counter(session.state for session in state.sessions),
        "coordinator_mib": [peak.own_before, peak.own],
        "tokenising_processes_mib": peak.children,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=["demo", "random"], default="demo")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--questions", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument(
        "--kv", default="3GiB", help="room of a stage for KV; with 8MiB a text is refused once it is tokenised"
    )
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        if asked.model == "demo":
            settings: dict[str, Any] = {}
            folder = resolve(DEMO)
        else:
            settings = {"context": CONTEXT, "kv": asked.kv}
            folder = random_model(Path(made))
        with cluster(folder, asked.stages, **settings) as endpoint:
            figures = asyncio.run(run(asked, endpoint, texts(folder)))
    print(json.dumps({"bench": f"prompts {asked.model}", "stages": asked.stages, **figures}))


if __name__ == "__main__":
    main()

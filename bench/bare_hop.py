"""What a hop costs two bare processes of torch and sockets, without zrt: what is left to reach
here. Prints one JSON object.

    python bench/bare_hop.py [--hops N]

One process asks, the other answers, 2.3 KB each way over loopback; between two messages each reads
the weights of some blocks of the demo model, one product after the other. Microseconds, the median
over all hops, of there and back less what the other computed, by its own clock: `tcp`: blocking TCP
in the thread that computes; `zeromq`: DEALER and ROUTER there; `executors`: DEALER and ROUTER on
uvloop, and beside it, in both processes, a thread that computes.
"""

import argparse
import asyncio
import json
import os
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from queue import SimpleQueue
from typing import Any

import torch
import uvloop
import zmq

HIDDEN, BLOCK = 576, 6144  # a block of the demo model has so many outputs in all, of so many inputs each
ASKER, ANSWERER = 28, 10  # blocks, the model's head counted as eight
WARM_UP = 32
SPENT = struct.Struct("<q")
SPIN = "10000"  # as long as threads of block servers and workers spin


class Blocks:
    def __init__(self, count: int) -> None:
        torch.set_num_threads(len(os.sched_getaffinity(0)))  # of the thread that computes
        self._weights = [torch.ones(BLOCK, HIDDEN) for _ in range(count)]

    def run(self, message: bytes) -> tuple[bytes, int]:
        """The row that follows, and the nanoseconds that it took."""
        row = torch.frombuffer(bytearray(message), dtype=torch.float32)
        started = time.perf_counter_ns()
        for weight in self._weights:
            product = torch.mv(weight, row)
        spent = time.perf_counter_ns() - started
        return product[:HIDDEN].numpy().tobytes(), spent

    def answer(self, message: bytes) -> bytes:
        row, spent = self.run(message)
        return SPENT.pack(spent) + row


class ComputeExecutor:
    """A thread that makes its blocks and runs what it is given; answered on the loop."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._work: SimpleQueue[Any] = SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    async def run(self, fn: Callable[..., Any], message: bytes) -> Any:
        future = asyncio.get_running_loop().create_future()
        self._work.put((future, fn, message))
        return await future

    def _run(self) -> None:
        blocks = Blocks(self._count)
        while True:
            future, fn, message = self._work.get()
            future.get_loop().call_soon_threadsafe(future.set_result, fn(blocks, message))


def on_loop(sock: Any, take: Callable[[list[bytes]], None]) -> Callable[[], None]:
    """Hand on what arrives. What is returned looks again, as is due after each send."""

    def read() -> None:
        while sock.get(zmq.EVENTS) & zmq.POLLIN:
            take(sock.recv_multipart())

    loop = asyncio.get_running_loop()
    loop.add_reader(sock.get(zmq.FD), read)
    return lambda: loop.call_soon(read)


def answer(mode: str) -> None:
    """Until it is killed; prints its port first."""
    if mode == "tcp":
        listener = socket.create_server(("127.0.0.1", 0))
        blocks = Blocks(ANSWERER)
        print(listener.getsockname()[1], flush=True)
        peer, _ = listener.accept()
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while message := peer.recv(4 * HIDDEN, socket.MSG_WAITALL):
            peer.sendall(blocks.answer(message))
        return
    router = zmq.Context().socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    if mode == "zeromq":
        blocks = Blocks(ANSWERER)
        print(port, flush=True)
        while True:
            name, message = router.recv_multipart()
            router.send_multipart([name, blocks.answer(message)])

    async def serve() -> None:
        executor = ComputeExecutor(ANSWERER)
        tasks = set()

        async def reply(name: bytes, message: bytes) -> None:
            router.send_multipart([name, await executor.run(Blocks.answer, message)])
            look()

        def take(frames: list[bytes]) -> None:
            task = asyncio.ensure_future(reply(*frames))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        look = on_loop(router, take)
        print(port, flush=True)
        await asyncio.Event().wait()

    uvloop.run(serve())


async def hops(count: int, run: Callable[[bytes], Awaitable[bytes]], hop: Callable[[bytes], Awaitable[bytes]]) -> float:
    row, overheads = bytes(4 * HIDDEN), []
    for _ in range(count):
        row = await run(row)
        started = time.perf_counter_ns()
        answer = await hop(row)
        overheads.append((time.perf_counter_ns() - started - SPENT.unpack_from(answer)[0]) / 1000)
        row = answer[SPENT.size :]
    return statistics.median(overheads[WARM_UP:])


async def ask(mode: str, port: int, count: int) -> float:
    if mode == "executors":
        dealer = zmq.Context().socket(zmq.DEALER)
        dealer.connect(f"tcp://127.0.0.1:{port}")
        executor, loop = ComputeExecutor(ASKER), asyncio.get_running_loop()
        waits: list[asyncio.Future[bytes]] = []
        look = on_loop(dealer, lambda frames: waits.pop().set_result(frames[0]))

        async def hop(row: bytes) -> bytes:
            dealer.send(row)
            waits.append(loop.create_future())
            look()
            return await waits[0]

        async def run(row: bytes) -> bytes:
            return (await executor.run(Blocks.run, row))[0]

        return await hops(count, run, hop)

    blocks = Blocks(ASKER)
    if mode == "tcp":
        peer = socket.create_connection(("127.0.0.1", port))
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        send, receive = peer.sendall, lambda: peer.recv(SPENT.size + 4 * HIDDEN, socket.MSG_WAITALL)
    else:
        dealer = zmq.Context().socket(zmq.DEALER)
        dealer.connect(f"tcp://127.0.0.1:{port}")
        send, receive = dealer.send, dealer.recv

    async def run_here(row: bytes) -> bytes:
        return blocks.run(row)[0]

    async def hop_here(row: bytes) -> bytes:
        send(row)
        return receive()

    return await hops(count, run_here, hop_here)


def measure(mode: str, count: int) -> float:
    """Microseconds a hop."""
    process = subprocess.Popen([sys.executable, __file__, "--answer", mode], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        return uvloop.run(ask(mode, int(process.stdout.readline()), count))
    finally:
        process.kill()
        process.wait()


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--hops", type=int, default=300)
    words.add_argument("--answer", choices=["tcp", "zeromq", "executors"], help=argparse.SUPPRESS)
    asked = words.parse_args()
    if asked.answer:
        answer(asked.answer)
    elif "GOMP_SPINCOUNT" not in os.environ:  # read once, when torch is loaded
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"GOMP_SPINCOUNT": SPIN})
    else:
        print(json.dumps({mode: round(measure(mode, asked.hops + WARM_UP)) for mode in ("tcp", "zeromq", "executors")}))


if __name__ == "__main__":
    main()

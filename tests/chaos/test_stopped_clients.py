"""Clients that are stopped (SIGSTOP) in the middle of their answers, for so long that their
connections break, and then go on."""

import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.clusters import cluster_file
from support.results import tell
from support.running import GREEDY, begun, running, start_zrt

CLIENTS = 6
TOKENS = 4000
STOPPED_S = 17.0
"""Longer than a connection lives unanswered, shorter than a lease."""
END_S = 90.0


@pytest.mark.chaos
@pytest.mark.timeout(300)
def test_each_has_the_rest_of_its_answer(make_model: Callable[..., Path], tmp_path: Path) -> None:
    """What arrived last is read first, from a connection that has broken meanwhile."""
    model = make_model("llama", eos_token_id=None, max_position_embeddings=1 << 14)
    conf = tmp_path / "cluster.toml"
    conf.write_text(cluster_file(model, [None, None], model_context=8000, kv_bytes="64MiB", limits_lease_s=30.0))
    clients: list[subprocess.Popen[str]] = []
    with running(str(conf), home=tmp_path) as cluster:
        try:
            for _ in range(CLIENTS):
                clients.append(start_zrt(*GREEDY, "--max-tokens", str(TOKENS), home=cluster.home))
            for client in clients:
                begun(client)
            for client in clients:
                client.send_signal(signal.SIGSTOP)
            time.sleep(STOPPED_S)
            for client in clients:
                client.send_signal(signal.SIGCONT)
            said = [client.communicate(timeout=END_S)[1] for client in clients]
        finally:
            for client in clients:
                client.kill()
                client.communicate()
    tell(stopped="clients", seconds=STOPPED_S, exits=[client.returncode for client in clients])
    assert [client.returncode for client in clients] == [0] * CLIENTS, said

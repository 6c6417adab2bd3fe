"""Snapshots of clusters as the coordinator tells them, of any size, with names that are hard to
show."""

from zrt.runtime.messages.client import Cluster
from zrt.runtime.messages.cluster import ActorInfo, DrainInfo, Happened, HopInfo, SessionInfo
from zrt.runtime.messages.stats import GroupLoad, GroupStep, KvStats, RankLoad, WorkerLoad


def actor(name: str, stage: int, **more: object) -> ActorInfo:
    made = ActorInfo(
        name, "block_server", "ready", stage=stage, blocks=f"{stage}-{stage}", device="cpu", host="h", pid=7
    )
    made.kv, made.turn_p50_ms, made.turn_p95_ms = KvStats(3, 0, 1, 4, 16), 1.25, 3.5
    for key, value in more.items():
        setattr(made, key, value)
    return made


def session(number: int, tokens: int = 10, **more: object) -> SessionInfo:
    made = SessionInfo(number, "decoding", 5, tokens, 1, ["stage0", "stage1"], client=f"client.{number:04d}")
    made.tokens_s, made.ttft_ms, made.asked_ms, made.gaps_ms = 20.0 + number, 50.0, number, [1.0, 2.0, 4.0]
    made.hops = [HopInfo("stage0", 0.5, 4.0, 0.1)]
    for key, value in more.items():
        setattr(made, key, value)
    return made


def step(serial: int, us: int = 400, **more: object) -> GroupStep:
    """Return a step of three ranks; the later a rank, the slower."""
    each = [us + 10 * rank for rank in range(3)]
    made = GroupStep(serial, "step_batch", 500, 2, 7, 20, [max(0, one - 50) for one in each], each, ["", "", ""])
    for key, value in more.items():
        setattr(made, key, value)
    return made


def group(steps: int, drain_us: int = 400, **more: object) -> GroupLoad:
    """Return the load of three ranks that have run so many steps."""
    ranks = [
        RankLoad(
            rank, 100 + rank, steps, 0, 300 * steps, (drain_us + rank) * steps, state="ready", rss_bytes=rank << 30
        )
        for rank in range(3)
    ]
    recent = [step(serial, drain_us) for serial in range(max(1, steps - 31), steps + 1)]
    made = GroupLoad("ready", 3, steps=steps, fan_out_us=20 * steps, ranks=ranks, recent=recent)
    for key, value in more.items():
        setattr(made, key, value)
    return made


def worker(name: str, **more: object) -> WorkerLoad:
    made = WorkerLoad(name, "ready", "3-4", "cpu", 10, 10, hop_us=2500, hops=9)
    for key, value in more.items():
        setattr(made, key, value)
    return made


def happened(serial: int, kind: str = "state", text: str = "is ready") -> Happened:
    return Happened(serial, 1000.0 + serial, kind, "stage0", text)  # type: ignore[arg-type]


def cluster(actors: int = 2, sessions: int = 2, **more: object) -> Cluster:
    made = Cluster(id="1", name="test", model="tiny", ready=True, context=256, num_blocks=64)
    made.actors = [actor(f"stage{number}", number) for number in range(actors)]
    made.sessions = [session(number) for number in range(sessions)]
    made.drains = [DrainInfo("stage0", "draining", "client.1", 9000, 1500, 2, 1, 0, 0)]
    for key, value in more.items():
        setattr(made, key, value)
    return made

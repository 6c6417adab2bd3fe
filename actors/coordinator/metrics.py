"""A cluster as Prometheus metrics: https://prometheus.io/docs/instrumenting/exposition_formats/.
Pure."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from zrt.actors.coordinator.sessions.latencies import Latencies
from zrt.runtime.messages.client import Cluster
from zrt.runtime.messages.cluster import ActorInfo

L = TypeVar("L", bound=tuple[str, ...])

STATES: Final = ("tokenising", "queued", "prefill", "decoding", "waiting", "preempted", "parked", "replaying")


def exposition(cluster: Cluster, latencies: Latencies, drains: Mapping[str, int]) -> bytes:
    """Return the text that GET /metrics answers; `drains` counts those that ended, by how."""
    registry = CollectorRegistry()
    registry.register(_Once(_cluster(cluster, latencies, drains)))
    return generate_latest(registry)


class _Once(Collector):
    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def _cluster(cluster: Cluster, latencies: Latencies, drains: Mapping[str, int]) -> Iterator[Metric]:
    yield GaugeMetricFamily("zrt_ready", "1 while every stage has a ready replica.", float(cluster.ready))
    yield GaugeMetricFamily("zrt_up_seconds", "Since the coordinator began.", cluster.up_ms / 1e3)
    sessions = Counter(session.state for session in cluster.sessions)
    yield _gauge("sessions", "Live sessions by state.", "state", {state: sessions[state] for state in STATES})
    yield CounterMetricFamily("zrt_tokens", "Tokens generated.", float(cluster.tokens))
    for name, text, seen in (
        ("zrt_first_token_seconds", "From the request to the first token.", latencies.first_token),
        ("zrt_inter_token_seconds", "From one token of a session to its next.", latencies.inter_token),
    ):
        yield HistogramMetricFamily(name, text, buckets=seen.buckets(), sum_value=seen.sum)
    yield _counter("errors", "Errors told to clients, by kind.", "kind", cluster.errors)
    yield _counter("drains", "Drains that ended, by how.", "state", drains)
    running = sum(drain.state == "draining" for drain in cluster.drains)
    yield GaugeMetricFamily("zrt_drains_running", "Block servers that are being drained.", float(running))
    yield CounterMetricFamily("zrt_stale", "What came too late and was dropped.", float(cluster.stale))
    yield from _actors(cluster.actors)


def _actors(actors: list[ActorInfo]) -> Iterator[Metric]:
    servers = [actor for actor in actors if actor.kind == "block_server"]

    def of_servers(show: Callable[[ActorInfo], float]) -> dict[tuple[str, str], float]:
        return {(actor.name, _stage(actor)): show(actor) for actor in servers}

    up = {(actor.name, _stage(actor), actor.state): 1.0 for actor in actors}
    yield _labelled(
        GaugeMetricFamily("zrt_actor", "1 for each process, in its state.", labels=("actor", "stage", "state")), up
    )
    labels = ("actor", "stage")
    for name, text, show in (
        ("zrt_queue", "Steps that wait.", lambda one: one.waiting),
        ("zrt_actor_sessions", "Sessions that hold something there.", lambda one: one.sessions),
        ("zrt_busy_ratio", "Share of the time that it computes.", lambda one: one.busy_share),
        ("zrt_tokens_per_second", "Tokens run, prompts included.", lambda one: one.tokens_s),
    ):  # fmt: skip
        yield _labelled(GaugeMetricFamily(name, text, labels=labels), of_servers(show))
    for name, text, show in (
        ("zrt_turns", "Batches run.", lambda one: one.turns),
        ("zrt_steps", "Steps run: one a session and turn.", lambda one: one.steps),
    ):
        yield _labelled(CounterMetricFamily(name, text, labels=labels), of_servers(show))
    steps = {(actor.name, _stage(actor), "0.5"): actor.turn_p50_ms / 1e3 for actor in servers}
    steps |= {(actor.name, _stage(actor), "0.95"): actor.turn_p95_ms / 1e3 for actor in servers}
    text = "What a batch took of late."
    yield _labelled(GaugeMetricFamily("zrt_turn_seconds", text, labels=("actor", "stage", "quantile")), steps)
    pages = {
        (actor.name, _stage(actor), state): float(getattr(actor.kv, state))
        for actor in servers
        if actor.kv is not None
        for state in ("free", "cached", "used")
    }
    yield _labelled(GaugeMetricFamily("zrt_kv_pages", "KV pages by state.", labels=("actor", "stage", "state")), pages)
    memory = {(actor.name, _stage(actor)): float(actor.rss_bytes) for actor in actors}
    yield _labelled(GaugeMetricFamily("zrt_memory_bytes", "Resident memory.", labels=labels), memory)
    restarts = {(actor.name, _stage(actor)): float(actor.restarts) for actor in actors}
    yield _labelled(CounterMetricFamily("zrt_restarts", "Times it was started again.", labels=labels), restarts)
    rebuilds = {(one.name, _stage(one)): float(one.group.rebuilds) for one in servers if one.group is not None}
    yield _labelled(
        CounterMetricFamily("zrt_group_rebuilds", "Times its ranks were grouped anew.", labels=labels), rebuilds
    )


def _stage(actor: ActorInfo) -> str:
    return str(actor.stage) if actor.stage >= 0 else ""


def _gauge(name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
    return _labelled(
        GaugeMetricFamily(f"zrt_{name}", text, labels=(label,)), {(key,): value for key, value in values.items()}
    )


def _counter(name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
    return _labelled(
        CounterMetricFamily(f"zrt_{name}", text, labels=(label,)), {(key,): value for key, value in values.items()}
    )


def _labelled(
    family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[L, float]
) -> GaugeMetricFamily | CounterMetricFamily:
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family

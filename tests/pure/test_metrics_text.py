"""A cluster as Prometheus metrics, read back by Prometheus' own parser."""

from prometheus_client.parser import text_string_to_metric_families
from support.snapshots import actor, cluster, group

from zrt.actors.coordinator.metrics import exposition
from zrt.actors.coordinator.sessions.latencies import INTER_TOKEN_S, Histogram, Latencies
from zrt.runtime.messages.client import Cluster


def read(seen: Cluster, latencies: Latencies | None = None, **drains: int) -> dict[tuple[str, ...], float]:
    """Each sample's value, by its name and its labels' values, sorted by label."""
    text = exposition(seen, latencies or Latencies(), drains).decode()
    return {
        (sample.name, *(sample.labels[label] for label in sorted(sample.labels))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_sessions_are_counted_by_state() -> None:
    seen = cluster(sessions=3)
    seen.sessions[0].state = "parked"
    found = read(seen)
    assert (found["zrt_sessions", "decoding"], found["zrt_sessions", "parked"]) == (2, 1)
    assert found["zrt_sessions", "queued"] == 0


def test_what_block_servers_tell_is_there_by_actor_and_stage() -> None:
    seen = cluster(sessions=0, tokens=7, errors={"overloaded": 3}, ready=False)
    seen.actors = [actor('段落 "x"\n', 4, waiting=2, restarts=1, steps=9, rss_bytes=5, group=group(1, 1))]
    found = read(seen, drained=2)
    name = '段落 "x"\n'
    assert found["zrt_queue", name, "4"] == 2
    assert found["zrt_restarts_total", name, "4"] == 1
    assert found["zrt_steps_total", name, "4"] == 9
    assert found["zrt_memory_bytes", name, "4"] == 5
    assert found["zrt_turn_seconds", name, "0.95", "4"] == 0.0035
    assert found["zrt_kv_pages", name, "4", "used"] == 1
    assert (found["zrt_tokens_total",], found["zrt_ready",]) == (7, 0)
    assert (found["zrt_errors_total", "overloaded"], found["zrt_drains_total", "drained"]) == (3, 2)


def test_times_are_histograms() -> None:
    latencies = Latencies()
    for seconds in (0.004, 0.006, 0.006, 99.0):
        latencies.inter_token.observe(seconds)
    found = read(cluster(), latencies)
    assert found["zrt_inter_token_seconds_bucket", "0.005"] == 1
    assert found["zrt_inter_token_seconds_bucket", "0.01"] == 3
    assert found["zrt_inter_token_seconds_bucket", "+Inf"] == found["zrt_inter_token_seconds_count",] == 4
    assert found["zrt_inter_token_seconds_sum",] == 99.016


def test_a_bucket_holds_its_upper_end() -> None:
    seen = Histogram(INTER_TOKEN_S)
    seen.observe(0.001)
    assert seen.buckets()[0] == ("0.001", 1)

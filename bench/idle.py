"""What a cluster that nobody uses costs: the CPU time of each of its processes.

    python bench/idle.py [--stages N] [--windows N] [--seconds S]

Prints one JSON object; shares are of one core, each the median of the windows. The kernel's
scheduler counts the time, in ns.
"""

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path

from sides import cluster, family, servers

from zrt.runtime.models.fetch.resolve import resolve


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--stages", type=int, default=2)
    words.add_argument("--windows", type=int, default=3)
    words.add_argument("--seconds", type=float, default=10.0)
    arguments = words.parse_args()
    with cluster(resolve("smollm2-135m"), arguments.stages) as endpoint:
        pids = family(asyncio.run(servers(endpoint)))
        shares = [window(pids, arguments.seconds) for _ in range(arguments.windows)]
    each = {name: round(statistics.median(share[name] for share in shares), 5) for name in pids}
    totals = sorted(round(sum(share.values()), 5) for share in shares)
    print(
        json.dumps({"core_share": statistics.median(totals), "range": [totals[0], totals[-1]], "each": each}, indent=2)
    )


def window(pids: dict[str, int], seconds: float) -> dict[str, float]:
    """The share of a core each process used in the next `seconds`."""
    before, start = {name: computed(pid) for name, pid in pids.items()}, time.monotonic()
    time.sleep(seconds)
    length = time.monotonic() - start
    return {name: (computed(pid) - before[name]) / length for name, pid in pids.items()}


def computed(pid: int) -> float:
    """Seconds that all threads of a process ran."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


if __name__ == "__main__":
    main()

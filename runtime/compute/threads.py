"""The CPU threads of a process that computes: how many, and how long an idle one spins. Imports
torch only once it is told to configure it."""

from typing import Final

SPIN_COUNT: Final = 10_000
BESIDE_A_GPU: Final = 4
"""The most threads beside a GPU: a turn leaves the CPU a batch's numbers and the sampling of some
sessions, too little work for more. All threads of a team are woken and waited for, however few have
work."""


def thread_environment(threads: int) -> dict[str, str]:
    """Return the environment variables of a process that will compute with `threads` threads;
    OpenMP (libgomp, in torch's wheel) reads them once, at its start.

    Between two products a thread that has nothing to do spins, then sleeps. Spinning is right
    within a forward, where the next product is microseconds away and waking a sleeper costs more;
    it is wrong between forwards, where it takes the core from the stage that now computes. Measured
    on two cores, a 135M-parameter model in float32 cut into two processes of two threads each,
    passing one token to and fro, ms a token: GOMP_SPINCOUNT=10000: 29.5 (one process holding both
    halves: 29.4); 100000: 29.7; 1000: 41.5; unset: 35.1; OMP_WAIT_POLICY=passive: 45.4.
    """
    return {"OMP_NUM_THREADS": str(threads), "GOMP_SPINCOUNT": str(SPIN_COUNT)}


def configure_threads(threads: int) -> None:
    """Set the number of threads for every operation of this process, whichever thread calls it."""
    import torch

    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)

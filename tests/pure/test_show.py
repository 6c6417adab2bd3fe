"""What a person reads of an answer's speed."""

import pytest

from zrt.runtime.messages.client import Finished, StageShare, Timings
from zrt.runtime.show import figures

OWN, LENDS = StageShare("stage0", "0-9", 5.0, 40.0, 1.0), StageShare("stage1", "10-29", 5.0, 60.0, 1.0, 20.0)


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ([OWN], ["stage0 (blocks 0-9): 100% of the compute, a token 4.0 ms computing, 0.5 waiting, 0.1 encoding"]),
        ([LENDS], ["stage1 (blocks 10-29): 67% of the compute, its layer workers 33%, a token 6.0 ms computing"]),
        (
            [OWN, LENDS],
            ["0-9): 40% of the compute, a token", "10-29): 40% of the compute, its layer workers 20%, a token"],
        ),
    ],
)
def test_each_stage_has_its_share_and_its_layer_workers_theirs(stages: list[StageShare], said: list[str]) -> None:
    timings = Timings(0.0, 70.0, 20.0, 9.0)
    finished = Finished(
        id="r", reason="length", prompt_tokens=3, completion_tokens=10, seed=7, timings=timings, stages=stages
    )
    lines = figures(finished).splitlines()
    assert len(lines) == len(stages) + 2
    for line, words in zip(lines[1:], said, strict=False):
        assert words in line

"""A Python module run as a program that does not outlive its parent:
`python -m zrt.runtime.process.tied MODULE ARGUMENT …`."""

import runpy
import sys
from typing import Final

from zrt.runtime.process.lifeline import hold

MODULE: Final = "zrt.runtime.process.tied"
"""The name by which this module is started."""


def main() -> None:
    """Hold the lifeline, then run the module as `python -m` would."""
    hold()
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

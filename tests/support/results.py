"""The findings of a chaos test as one JSON line: shown, and kept in the file that $ZRT_RESULTS
names."""

import json
import os


def tell(**cell: object) -> None:
    """Print one finding as JSON, numbers rounded to a hundredth, and append it to the file, if
    there is one."""
    line = json.dumps({key: round(value, 2) if isinstance(value, float) else value for key, value in cell.items()})
    print(line)
    path = os.environ.get("ZRT_RESULTS")
    if path:
        with open(path, "a") as file:
            file.write(line + "\n")

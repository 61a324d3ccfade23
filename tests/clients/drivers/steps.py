"""Runs one step of a driver: `python DRIVER.py BASE_URL MODEL STEP`. Needs nothing but Python.

A driver has one function per step.
A step uses the client as its users do, and checks what the client returns.
"""

import json
import sys
import warnings
from collections.abc import Callable

QUESTION = "Hey, quick check: is everything up and running?"
DESCRIPTION = "Returns the current health status of the LLM runtime."
STATUS = "All systems are up."


def run(*steps: Callable[[str, str], object]) -> None:
    """Run the step that the command line names, and print what it returns as a line of JSON."""
    warnings.simplefilter("ignore")  # of the client's own packages
    base_url, model, name = sys.argv[1:]
    (step,) = [each for each in steps if each.__name__ == name]
    print(json.dumps({"step": name, "shown": str(step(base_url, model))[:200]}))


def check(condition: object, *shown: object) -> None:
    """Fail with what was seen, also where Python runs without assertions."""
    if not condition:
        raise SystemExit(f"not as expected: {shown!r}")

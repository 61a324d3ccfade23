"""Find the benchmarks of a checkout, so that `python -m dynamo_trtllm.bench.profile` works there as
in the wheel.

The wheel has the benchmarks in this place, without this file.
"""

from pathlib import Path

__path__ = [str(Path(__file__).parents[2] / "benchmarks")]

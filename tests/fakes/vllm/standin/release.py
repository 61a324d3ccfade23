"""The release that the stand-in plays: STANDIN_VLLM, by default the oldest that is supported."""

import os

VERSION = os.environ.get("STANDIN_VLLM", "0.24.0")
LINE = tuple(int(part) for part in VERSION.split(".")[:2])  # (0, 32) of 0.32.0
REPORTS_FAILED_READS = LINE >= (0, 30)

"""The requests and answers that the guides show, the model's name replaced by the demo model's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.kit.cluster import TINY

GUIDES: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "data" / "guide_requests.json").read_text()
)
REQUESTS: dict[str, dict[str, Any]] = {
    " ".join([request["name"], *request["guides"]]): request["body"] | {"model": TINY}
    for request in GUIDES["requests"]
}
FIRST = "first round 001"
SECOND = "second round 001"

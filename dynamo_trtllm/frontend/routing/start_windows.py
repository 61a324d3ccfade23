"""Keep a start window for each model."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from dynamo_trtllm.frontend.routing.cluster_view import ClusterView
from dynamo_trtllm.frontend.routing.start_window import StartWindow


class StartWindows:
    """The start windows of all models.

    Args:
        view: the workers.
        on_capacity: called when requests may begin.
        uses_all_paths: see `capacity`.
        ttft_s: see `StartWindow`.
        clock: see `StartWindow`.
    """

    def __init__(
        self,
        view: ClusterView,
        on_capacity: Callable[[], None],
        *,
        uses_all_paths: bool = False,
        ttft_s: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._view = view
        self._on_capacity = on_capacity
        self._uses_all_paths = uses_all_paths
        self._ttft_s = ttft_s
        self._clock = clock
        self.by_model: dict[str, StartWindow] = {}

    def window(self, model: str) -> StartWindow:
        """Return the window of a model that exists."""
        window = self.by_model.get(model)
        if window is None:
            window = StartWindow(
                model,
                self._view,
                self._on_capacity,
                uses_all_paths=self._uses_all_paths,
                ttft_s=self._ttft_s,
                clock=self._clock,
            )
            self.by_model[model] = window
        return window

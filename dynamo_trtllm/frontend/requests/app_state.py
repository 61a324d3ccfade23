"""Hold the objects that all requests share."""

from __future__ import annotations

from dynamo_trtllm.config.models import FrontendConfig
from dynamo_trtllm.frontend.fleet.model_registry import ModelRegistry
from dynamo_trtllm.frontend.generation.request_router import RequestRouter
from dynamo_trtllm.frontend.requests.admission import AdmissionLimits
from dynamo_trtllm.frontend.requests.ignored_fields import IgnoredFieldReports
from dynamo_trtllm.frontend.requests.loop_turns import LoopTurns
from dynamo_trtllm.frontend.requests.output_budget import OutputBudget
from dynamo_trtllm.frontend.requests.request_log import RequestLog
from dynamo_trtllm.frontend.requests.running_answers import RunningAnswers
from dynamo_trtllm.frontend.requests.subscribers import (
    RequestMetrics,
    RequestRecorder,
    RequestTraces,
)
from dynamo_trtllm.frontend.requests.timeline import TimelineSubscriber
from dynamo_trtllm.observability.metrics import FrontendMetrics
from dynamo_trtllm.observability.traces import TraceExporter


class AppState:
    """The objects that all requests share."""

    def __init__(
        self,
        config: FrontendConfig,
        models: ModelRegistry,
        router: RequestRouter,
        metrics: FrontendMetrics,
        traces: TraceExporter | None = None,
    ) -> None:
        self.config = config
        self.models = models
        self.router = router
        self.limits = AdmissionLimits(config)
        self.turns = LoopTurns()
        self.output_budget = OutputBudget()
        self.running = RunningAnswers()
        self.ignored_fields = IgnoredFieldReports(config.unknown_fields, metrics)
        # They get the events of each request, in this order.
        self.subscribers: list[TimelineSubscriber] = [RequestRecorder(), RequestMetrics(metrics)]
        if traces is not None:
            self.subscribers.append(RequestTraces(traces))
        self.subscribers.append(RequestLog())

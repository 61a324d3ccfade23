"""Create what the requests of a frontend need beyond their own objects."""

from __future__ import annotations

from dynamo_trtllm.config.models import FrontendConfig
from dynamo_trtllm.frontend.requests.admission import AdmissionLimits, LoopTurns
from dynamo_trtllm.frontend.requests.answer import RunningAnswers
from dynamo_trtllm.frontend.requests.output_budget import OutputBudget
from dynamo_trtllm.frontend.requests.request_reports import (
    IgnoredFieldReports,
    RequestLog,
    RequestMetrics,
    RequestRecorder,
    RequestTraces,
)
from dynamo_trtllm.frontend.requests.timeline import TimelineSubscribers
from dynamo_trtllm.frontend.requests.traces import TraceExporter
from dynamo_trtllm.frontend.routing.model_registry import ModelRegistry
from dynamo_trtllm.frontend.routing.request_router import RequestRouter
from dynamo_trtllm.observability.metrics import FrontendMetrics


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
        self.limits = AdmissionLimits(config, router.view)
        self.turns = LoopTurns()
        self.output_budget = OutputBudget()
        self.running = RunningAnswers()
        self.ignored_fields = IgnoredFieldReports(config.unknown_fields, metrics)
        self.subscribers = TimelineSubscribers()
        RequestRecorder().subscribe(self.subscribers)
        RequestMetrics(metrics).subscribe(self.subscribers)
        if traces is not None:
            RequestTraces(traces).subscribe(self.subscribers)
        RequestLog().subscribe(self.subscribers)

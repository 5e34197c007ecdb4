"""StepSpans: an OpenTelemetry span for each step, linked to the spans that generated its groups."""

from __future__ import annotations

import time

from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from replay_client.tracing import TRACEPARENT
from replay_trainer.callbacks import Callback, Run, StepReport


class StepSpans(Callback):
    """Needs the package opentelemetry-api, and a tracer provider that the program has set."""

    def __init__(self) -> None:
        self._tracer = trace.get_tracer("replay_trainer")
        self._propagator = TraceContextTextMapPropagator()

    def on_step(self, trainer: Run, report: StepReport) -> None:
        metrics, end = report.metrics, time.time_ns()
        links = []
        for sample in report.samples:
            if isinstance(parent := sample.group.meta.get(TRACEPARENT), str):
                context = trace.get_current_span(self._propagator.extract({TRACEPARENT: parent})).get_span_context()
                links.append(trace.Link(context, {"replay.key": str(sample.info.key)}))
        names = {"replay.step": "step", "replay.loss": "train/loss", "replay.replaced": "replay/groups_replaced"}
        span = self._tracer.start_span(
            "replay.train_step",
            start_time=end - int(1e9 * metrics["time/step"]),
            links=links,
            attributes={name: metrics[field] for name, field in names.items() if field in metrics},
        )
        span.end(end)

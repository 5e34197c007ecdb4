"""Sets up OpenTelemetry's SDK for a command, from OpenTelemetry's own environment variables."""

from __future__ import annotations

import os
import sys

from replay_server.cli.output import fail


def set_up_tracing(service: str) -> bool:
    """Returns whether spans are exported.

    OTEL_TRACES_EXPORTER is otlp (over HTTP to OTEL_EXPORTER_OTLP_ENDPOINT), console (to standard error) or none. With
    an endpoint alone it is otlp. OTEL_TRACES_SAMPLER sets the sampling.
    """
    endpoint = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    exporter = os.environ.get("OTEL_TRACES_EXPORTER") or ("otlp" if endpoint else "none")
    if exporter == "none" or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    if exporter not in ("otlp", "console"):
        fail(f"OTEL_TRACES_EXPORTER must be otlp, console or none, not {exporter!r}")
    try:
        from opentelemetry import trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter

        if exporter == "console":
            chosen: SpanExporter = ConsoleSpanExporter(out=sys.stderr, formatter=lambda span: span.to_json(None) + "\n")
        else:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            chosen = OTLPSpanExporter()
    except ImportError as error:
        fail(
            f"OTEL_TRACES_EXPORTER={exporter} needs packages ({error}): "
            f"pip install '.[otel]' in a clone of the repository"
        )
    provider = TracerProvider(resource=Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME", service)}))
    provider.add_span_processor(BatchSpanProcessor(chosen))
    trace.set_tracer_provider(provider)
    return True

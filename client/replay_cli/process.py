"""What the commands that run for long share: their log, their recipe in it, their spans, and the check of a model."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer

from replay_cli.output import fail

LogFormat = Annotated[Literal["text", "json"], typer.Option("--log-format", help="Format of log lines: text or json.")]


LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"],
    typer.Option("--log-level", case_sensitive=False, help="Log from this level on."),
]


class JsonFormatter(logging.Formatter):
    """A JSON document a line: `time` (UTC), `level`, `logger`, `message` and, after an exception, `exception`."""

    def format(self, record: logging.LogRecord) -> str:
        seconds, milliseconds = time.gmtime(record.created), int(record.msecs)
        line = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', seconds)}.{milliseconds:03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def log_to_stderr(level: str, form: str = "text") -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(
        JsonFormatter() if form == "json" else logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    )
    logging.basicConfig(level=level.upper(), handlers=[handler])


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


def check_model(model: str) -> None:
    """Ends the command if `model` is a path that does not exist. transformers would look for that name on the hub."""
    if model.startswith(("/", ".", "~")) and not Path(model).is_dir():
        fail(f"--model: there is no folder {model}")


@contextmanager
def loading(model: str) -> Iterator[None]:
    """Names the model in the error of a block that loads it, and says it in one line.

    The errors of transformers have several lines, and some of them do not name the model.
    """
    try:
        yield
    except OSError as error:
        missing = "" if Path(model).exists() else "; there is no folder of this name here"
        raise ValueError(f"--model {model} cannot be loaded{missing}: {' '.join(str(error).split())}") from error

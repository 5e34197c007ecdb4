"""What the commands that run for long share: their log, their recipe in it, their spans, and the check of a model."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Literal

import typer

from replay_cli.output import fail, one_line
from replay_client.waits import stop_signals

LogFormat = Annotated[Literal["text", "json"], typer.Option("--log-format", help="Format of log lines.")]


LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"],
    typer.Option("--log-level", case_sensitive=False, help="Log from this level on."),
]


class TextFormatter(logging.Formatter):
    """A line a record, with its time, level and logger, and a traceback below it after an exception."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        if getattr(record, "has_lines", False) or not record.name.startswith("replay_"):
            return line  # a recipe, and other packages, which write lists and boxes
        return one_line(line)


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
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
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
    """Ends the command if `model` is a path that does not exist."""
    if is_missing(model):
        fail(f"--model: there is no folder {model}")


def is_missing(model: str) -> bool:
    """Tells whether `model` is a path that does not exist. transformers would look for that name on the hub."""
    return model.startswith(("/", ".", "~")) and not Path(model).is_dir()


@contextmanager
def loading(model: str) -> Iterator[None]:
    """Names the model in the error of a block that loads it, and says it in one line.

    The errors of transformers have several lines, and some of them do not name the model.
    """
    try:
        yield
    except OSError as error:
        raise ValueError(why_not_loaded(model, error)) from error


def why_not_loaded(model: str, error: Exception) -> str:
    """The error of transformers in one line, with the model."""
    missing = "" if Path(model).exists() else "; there is no folder of this name here"
    return f"--model {model} cannot be loaded{missing}: {' '.join(str(error).split())}"


IN_A_RUN = "REPLAY_RUN"
"""Variable of a part of `replay run`: the process that stops it."""
SAME_REQUEST = 2.0
"""Seconds after the first signal in which others belong to it."""


class FirstSignal:
    """Inside, the first signal that would end the command calls `act` instead, and a later one ends the command.

    What comes in the two seconds after the first signal is the same request: of one Ctrl-C a rank may hear from the
    terminal and from torchrun, and a scheduler may send two signals at once. Whoever wants to hurry waits that long.

    A part of `replay run` may hear of one stop from a scheduler, which tells all processes, and later from the run.
    There SIGINT alone hurries.
    """

    def __init__(self, act: Callable[[], None]) -> None:
        self.number = 0
        """The number of the first signal; 0: none has come."""
        self._act = act
        self._at = 0.0
        """When it came, by the monotonic clock."""
        self._before: dict[int, Callable[[int, FrameType | None], Any]] = {}

    def __enter__(self) -> FirstSignal:
        for number in stop_signals():
            handler = signal.getsignal(number)
            if callable(handler):  # an ignored one stays so
                self._before[number] = handler
                signal.signal(number, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.number:
            self.number = number
            self._at = now
            self._act()
            return
        hurries = number == signal.SIGINT if IN_A_RUN in os.environ else now - self._at > SAME_REQUEST
        if hurries:
            self._before[number](number, frame)


def say_later(function: Callable[[str], None], message: str) -> None:
    """Calls `function` on a thread: a signal handler may interrupt a line that is being printed, and can print none."""
    threading.Thread(target=function, args=(message,)).start()

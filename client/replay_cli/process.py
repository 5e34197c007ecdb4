"""Sets up logs, traces and signals for the commands that run for long, and checks the name of a model."""

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
    """Writes one line for each record: time, level, logger and message. A traceback follows after an exception."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Overrides logging's method: the text of a record without its traceback.

        Control characters in a record of this project become escapes, so that a name chosen by a user cannot start a
        new line.
        """
        line = super().formatMessage(record)
        is_ours = record.name.startswith("replay_")
        has_lines = getattr(record, "has_lines", False)  # only `show_recipe` logs several lines
        if is_ours and not has_lines:
            return one_line(line)
        return line  # other packages log lists and boxes, which have several lines


class JsonFormatter(logging.Formatter):
    """Writes each record as a line of JSON: `time` (UTC), `level`, `logger`, `message` and perhaps `exception`."""

    def format(self, record: logging.LogRecord) -> str:
        """Overrides logging's method: the record as a line of JSON."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        milliseconds = int(record.msecs)
        line = {
            "time": f"{seconds}.{milliseconds:03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def log_to_stderr(level: str, form: str = "text") -> None:
    """Sends the log of this process to standard error. `level`: the lowest level to log. `form`: text or json."""
    formatter = JsonFormatter() if form == "json" else TextFormatter()
    handler = logging.StreamHandler()
    handler.setFormatter(formatter)
    logging.basicConfig(level=level.upper(), handlers=[handler])


def set_up_tracing(service: str) -> bool:
    """Sets up the export of spans. Returns False if the environment asks for no export.

    `service`: the name under which spans are exported, unless OTEL_SERVICE_NAME is set.

    OTEL_TRACES_EXPORTER is otlp (over HTTP to OTEL_EXPORTER_OTLP_ENDPOINT), console (to standard error) or none. If
    it is not set, an endpoint makes it otlp. OTEL_TRACES_SAMPLER sets the sampling.
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
            # `indent=None` puts each span into one line.
            chosen: SpanExporter = ConsoleSpanExporter(
                out=sys.stderr, formatter=lambda span: span.to_json(indent=None) + "\n"
            )
        else:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            chosen = OTLPSpanExporter()
    except ImportError as error:
        fail(
            f"OTEL_TRACES_EXPORTER={exporter} needs packages ({error}): "
            f"pip install '.[otel]' in a clone of the repository"
        )
    service_name = os.environ.get("OTEL_SERVICE_NAME", service)
    provider = TracerProvider(resource=Resource.create({"service.name": service_name}))
    provider.add_span_processor(BatchSpanProcessor(chosen))
    trace.set_tracer_provider(provider)
    return True


def check_model(model: str) -> None:
    """Ends the command if `model` is a path that does not exist."""
    if is_missing(model):
        fail(f"--model: there is no folder {model}")


def is_missing(model: str) -> bool:
    """True if `model` is a path that does not exist. transformers would look for such a name on the hub."""
    return model.startswith(("/", ".", "~")) and not Path(model).is_dir()


@contextmanager
def loading(model: str) -> Iterator[None]:
    """Turns an OSError of the block, which loads a model, into a ValueError of one line that names the model.

    The error of transformers may have several lines, and may not name the model.
    """
    try:
        yield
    except OSError as error:
        raise ValueError(why_not_loaded(model, error)) from error


def why_not_loaded(model: str, error: Exception) -> str:
    """The error of transformers in one line, which names the model."""
    missing = "" if Path(model).exists() else "; there is no folder of this name here"
    reason = " ".join(str(error).split())
    return f"--model {model} cannot be loaded{missing}: {reason}"


IN_A_RUN = "REPLAY_RUN"
"""Environment variable that `replay run` sets for its parts. The value is the id of the process that stops them."""
SAME_REQUEST = 2.0
"""Seconds after the first signal in which further signals belong to the same request."""


class FirstSignal:
    """Inside the block, the first signal calls `act` instead of ending the command. A later signal ends the command.

    Signals within SAME_REQUEST after the first one belong to the same request: a rank may get one Ctrl-C twice, from
    the terminal and from torchrun, and a scheduler may send two signals at once. A person who wants to end the command
    at once has to wait that long before the second Ctrl-C.

    A part of `replay run` may get two signals for one stop: first from a scheduler, which signals all processes, and
    later from the run. Therefore only a later SIGINT ends a part.
    """

    def __init__(self, act: Callable[[], None]) -> None:
        """`act` is called by a signal handler, so it must be quick, and must not print."""
        self.number = 0
        """The number of the first signal; 0: no signal has come."""
        self._act = act
        self._first_time = 0.0
        """The time of the first signal, by the monotonic clock."""
        self._before: dict[int, Callable[[int, FrameType | None], Any]] = {}
        """The handler that each signal had before the block, by the number of the signal."""

    def __enter__(self) -> FirstSignal:
        """Handles the stop signals until the end of the block, which restores the handlers from before."""
        for number in stop_signals():
            handler = signal.getsignal(number)
            if callable(handler):  # an ignored signal stays ignored
                self._before[number] = handler
                signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """The handler of the signals inside the block."""
        now = time.monotonic()
        if not self.number:
            self.number = number
            self._first_time = now
            self._act()
            return
        if IN_A_RUN in os.environ:
            ends_command = number == signal.SIGINT
        else:
            ends_command = now - self._first_time > SAME_REQUEST
        if ends_command:
            self._before[number](number, frame)  # the handler from before the block ends the command


def say_later(function: Callable[[str], None], message: str) -> None:
    """Calls `function` on a new thread. A signal handler cannot print: it may interrupt the printing of a line."""
    threading.Thread(target=function, args=(message,)).start()

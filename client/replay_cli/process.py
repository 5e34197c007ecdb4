"""Sets up logs, traces and signals for commands that run for a long time, and checks the name of a model."""

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
        has_lines = getattr(record, "has_lines", False)  # `show_recipe` sets this, because its record has several lines
        if is_ours and not has_lines:
            return one_line(line)
        return line  # records of other packages may have several lines, because they contain lists and boxes


class JsonFormatter(logging.Formatter):
    """Writes each record as a line of JSON: `time` (UTC), `level`, `logger`, `message` and perhaps `exception`."""

    def format(self, record: logging.LogRecord) -> str:
        """Overrides logging's method: the record as a line of JSON."""
        utc = time.gmtime(record.created)
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", utc)
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
    it is not set, spans are exported over otlp if an endpoint is set, and otherwise not. OTEL_TRACES_SAMPLER sets the
    sampling.
    """
    endpoint = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    kind = os.environ.get("OTEL_TRACES_EXPORTER") or ("otlp" if endpoint else "none")
    is_disabled = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if kind == "none" or is_disabled:
        return False
    if kind not in ("otlp", "console"):
        fail(f"OTEL_TRACES_EXPORTER must be otlp, console or none, not {kind!r}")
    try:
        from opentelemetry import trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter

        if kind == "console":
            # `indent=None` puts each span into one line.
            exporter: SpanExporter = ConsoleSpanExporter(
                out=sys.stderr, formatter=lambda span: span.to_json(indent=None) + "\n"
            )
        else:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            exporter = OTLPSpanExporter()
    except ImportError as error:
        fail(
            f"OTEL_TRACES_EXPORTER={kind} needs packages ({error}): pip install '.[otel]' in a clone of the repository"
        )
    service_name = os.environ.get("OTEL_SERVICE_NAME", service)
    provider = TracerProvider(resource=Resource.create({"service.name": service_name}))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return True


def check_model(model: str) -> None:
    """Ends the command if `model` is a path at which there is no folder."""
    if is_missing(model):
        fail(f"--model: there is no folder {model}")


def is_missing(model: str) -> bool:
    """True if `model` is a path at which there is no folder. transformers would look for this path on the hub."""
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
    """The error of transformers as a message of one line that names the model."""
    hint = "" if Path(model).exists() else "; there is no folder of this name here"
    reason = " ".join(str(error).split())
    return f"--model {model} cannot be loaded{hint}: {reason}"


IN_A_RUN = "REPLAY_RUN"
"""Environment variable that `replay run` sets for its parts. Its value is the process id of `replay run`."""
SAME_REQUEST = 2.0
"""Seconds after the first signal in which further signals belong to the same request."""


class FirstSignal:
    """Inside the block, the first signal calls `act` instead of ending the command. A later signal ends the command.

    Signals within SAME_REQUEST after the first one do nothing, because they belong to the same request: a rank may get
    one Ctrl-C twice, from the terminal and from torchrun, and a scheduler may send two signals at once. So a person who
    wants the second Ctrl-C to end the command has to wait for SAME_REQUEST seconds before it.

    In a part of `replay run`, only a later SIGINT ends the command, but it does so at any time. The reason is that a
    part may get two signals for one stop: one from a scheduler, which signals all processes, and later SIGTERM from the
    run.
    """

    def __init__(self, act: Callable[[], None]) -> None:
        """A signal handler calls `act`, so `act` must be quick, and must not print."""
        self.number = 0
        """The number of the first signal; 0: no signal has come."""
        self._act = act
        self._first_time = 0.0
        """The time of the first signal, by the monotonic clock."""
        self._handlers_before: dict[int, Callable[[int, FrameType | None], Any]] = {}
        """The handler that each signal had before the block, by the number of the signal."""

    def __enter__(self) -> FirstSignal:
        """Handles the stop signals from now on. `__exit__` restores the handlers from before the block."""
        for number in stop_signals():
            handler = signal.getsignal(number)
            if callable(handler):  # an ignored signal stays ignored
                self._handlers_before[number] = handler
                signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Handles a signal inside the block: calls `act` at the first signal. A later one may end the command."""
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
            handler_before = self._handlers_before[number]
            handler_before(number, frame)  # this ends the command


def say_later(function: Callable[[str], None], message: str) -> None:
    """Calls `function` with the message on a new thread.

    A signal handler calls this and does not print itself, because it may have interrupted the printing of a line.
    """
    threading.Thread(target=function, args=(message,)).start()

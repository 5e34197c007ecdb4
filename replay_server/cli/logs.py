"""The log of a command on standard error, as text or as JSON."""

from __future__ import annotations

import json
import logging
import time
from enum import StrEnum
from typing import Annotated

import typer

from replay_server.cli.output import misuse


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


LogFormatOption = Annotated[LogFormat, typer.Option("--log-format", help="Format of log lines: text or json.")]


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


def log_to_stderr(level: str, form: LogFormat = LogFormat.TEXT) -> None:
    if level.upper() not in logging.getLevelNamesMapping():
        misuse(f"--log-level must be debug, info, warning or error, not {level!r}")
    handler = logging.StreamHandler()
    handler.setFormatter(
        JsonFormatter()
        if form is LogFormat.JSON
        else logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    )
    logging.basicConfig(level=level.upper(), handlers=[handler])

"""Why an engine of vLLM died, as its log tells it. test_vllm_engine.py lets real ones die."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from replay_generator.engines import vllm as module
from replay_generator.engines.vllm import VLLMLog

RELOAD = """2026-11-22 16:00:00,000 pid=7 ERROR Invocation of collective_rpc method failed
Traceback (most recent call last):
  File "core.py", line 1, in call
    load()

OSError: half a file
"""
DEATH = """2026-11-22 16:01:00,000 pid=7 ERROR EngineCore encountered a fatal error.
Traceback (most recent call last):
  File "core.py", line 2, in step
    gen.get_offset()
    ^^^^^^^^^^^^^^^^
RuntimeError: CPU Generator does not use offset
2026-11-22 16:01:00,001 pid=6 ERROR AsyncLLM output_handler failed.
Traceback (most recent call last):
  File "async_llm.py", line 3, in output_handler
    raise error
vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root cause.
"""


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> VLLMLog:
    monkeypatch.setenv("VLLM_LOGGING_CONFIG_PATH", "restored after the test")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return VLLMLog()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "its process ended without a word; was it killed, for example for its memory?"),
        (DEATH, "RuntimeError: CPU Generator does not use offset (vLLM's log: "),
        (RELOAD + DEATH, "RuntimeError: CPU Generator does not use offset (vLLM's log: "),
    ],
    ids=["nothing", "a death", "an earlier error"],
)
def test_the_reason_is_the_last_error_that_follows_from_no_other(log, text, reason):
    settings = json.loads(Path(os.environ["VLLM_LOGGING_CONFIG_PATH"]).read_text())
    if text:
        Path(settings["handlers"]["file"]["filename"]).write_text(text)
    assert log.reason().startswith(reason)


def test_a_log_that_somebody_may_want_to_read_stays_at_the_end_of_the_process_and_others_go(tmp_path):
    code = f"from {module.__name__} import VLLMLog\nother, log = VLLMLog(), VLLMLog()\nlog.reason()"
    subprocess.run([sys.executable, "-c", code], env=os.environ | {"TMPDIR": str(tmp_path)}, check=True)
    assert len([*tmp_path.iterdir()]) == 1


SAYS_WHERE = f"""
import os
from {module.__name__} import vllm_log
for name in ("VLLM_LOGGING_LEVEL", "VLLM_LOGGING_CONFIG_PATH", "VLLM_CONFIGURE_LOGGING"):
    os.environ[name] = "1"
    assert vllm_log() is None, name
    del os.environ[name]
assert vllm_log() is not None
"""


def test_somebody_who_says_where_vllm_logs_to_keeps_that():
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    subprocess.run([sys.executable, "-c", SAYS_WHERE], env=environment, check=True)

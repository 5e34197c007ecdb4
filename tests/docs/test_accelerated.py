"""The loop under accelerate of its page: two processes over gloo train as one does."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from replay_client import ReplayClient
from replay_server import ReplayServer, TableConfig
from tests.docs.blocks import ROOT, write_files
from tests.factories import make_group
from tests.trainer.factories import make_model

# The limit is a guard against hanging; two processes start where others may be busy.
pytestmark = [pytest.mark.long, pytest.mark.timeout(1000)]


def run(folder: Path, address: str, processes: int, groups: int) -> dict[str, torch.Tensor]:
    """The weights after one step of `processes` processes, with `groups` groups each.

    Without prefetch: a process that draws ahead would take the groups of the other.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = "import accelerated, sys; accelerated.train('base', sys.argv[1], 'out', 1, int(sys.argv[2]), prefetch=0)"
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(processes),
        "OMP_NUM_THREADS": "1",
    }
    ranks: list[dict[str, str]] = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]
    started = [
        subprocess.Popen(
            [sys.executable, "-c", script, address, str(groups)],
            cwd=folder,
            env=os.environ | ({} if processes == 1 else shared | rank),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ranks
    ]
    try:
        said = [process.communicate(timeout=500)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * processes, "\n".join(said)
    weights: dict[str, Any] = AutoModelForCausalLM.from_pretrained(folder / "out/step-1").state_dict()
    return weights


def test_two_processes_under_accelerate_train_as_one_does(tmp_path: Path) -> None:
    weights = {}
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        folder.mkdir()
        write_files(ROOT / "docs/how-to/lora.md", folder)
        make_model().save_pretrained(folder / "base")
        tables = [
            TableConfig(name="rollouts", rate_limiter={"type": "queue", "max_size": 8}, forward_to="replay"),
            TableConfig(name="replay", sampler="prioritized", remover="min_heap"),
        ]
        with ReplayServer(tables=tables, port=0) as server, ReplayClient(server.address) as client:
            # Unequal lengths: a mean over the processes of each one's mean would be another gradient.
            for number in range(4):
                completions = [[3 + number] * (1 + 3 * number), [9, 10]]
                group = make_group(prompt=[5, 6 + number], rewards=[1.0, 0.0], completions=completions, logprobs=-2.5)
                client.insert(group, {"rollouts": 1.0})
            weights[processes] = run(folder, server.address, processes, 4 // processes)
            assert client.policy().version == 1
            assert client.server_info().tables["rollouts"].size == 0
    start = make_model().state_dict()
    assert max(float((weights[1][name] - start[name]).abs().max()) for name in start) > 1e-3
    for name, tensor in weights[1].items():
        torch.testing.assert_close(weights[2][name], tensor, rtol=1e-4, atol=1e-6)

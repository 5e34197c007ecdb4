"""The loop under accelerate of its page: two processes over gloo train as one does."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from replay_client import ReplayClient
from replay_client.testing import make_group
from replay_server import ReplayServer
from replay_server.config import DEFAULT_TABLES
from tests.docs.blocks import ROOT, write_files
from tests.kit.models import NEAR, assert_same_weights, make_model
from tests.kit.processes import run_ranks

# The limit is a guard against hanging; two processes start where others may be busy.
pytestmark = [pytest.mark.long, pytest.mark.timeout(1000)]


def train(folder: Path, address: str, groups: int) -> None:
    """The page's loop for one step. Without prefetch: a process that draws ahead would take the groups of the other."""
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    import accelerated

    accelerated.train("base", address, "out", 1, groups, prefetch=0)


def test_two_processes_under_accelerate_train_as_one_does(tmp_path):
    weights = {}
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        folder.mkdir()
        write_files(ROOT / "docs/how-to/lora.md", folder)
        make_model().save_pretrained(folder / "base")
        with ReplayServer(DEFAULT_TABLES, port=0) as server, ReplayClient(server.address) as client:
            # Unequal lengths: a mean over the processes of each one's mean would be another gradient.
            for number in range(4):
                completions = [[3 + number] * (1 + 3 * number), [9, 10]]
                group = make_group(prompt=[5, 6 + number], rewards=[1.0, 0.0], completions=completions, logprobs=-2.5)
                client.insert(group, {"rollouts": 1.0})
            assert run_ranks(processes, train, folder, server.address, 4 // processes) == [""] * processes
            weights[processes] = AutoModelForCausalLM.from_pretrained(folder / "out/step-1").state_dict()
            assert client.policy().version == 1
            assert client.server_info().tables["rollouts"].size == 0
    start = make_model().state_dict()
    assert max(float((weights[1][name] - start[name]).abs().max()) for name in start) > 1e-3
    assert_same_weights(weights[2], weights[1], **NEAR)

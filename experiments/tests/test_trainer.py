"""What experiments on the trainer measure: sums by hand, and one of them run."""

import json
import subprocess
import sys

import pytest

from benchmarks.environments import ROOT
from experiments.gradient import figures
from experiments.trainer import shared


@pytest.mark.long
@pytest.mark.timeout(300)
def test_what_an_adapter_costs_is_measured_beside_trls_own_queue_and_in_its_own_trainer():
    command = [sys.executable, "-m", "experiments.trainer.adapters", "--only", "trl", "async_grpo", "--groups", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    trl, async_grpo = map(json.loads, done.stdout.splitlines())
    assert min(trl["stored"], trl["replaced"], async_grpo["own"], async_grpo["ours"]) > 0


def test_what_a_step_waits_is_divided_between_generator_reload_buffer_and_publication():
    group = {"finished": 0.0, "scored": 1.0}
    early = {"step": 1, "seconds": 10.0, "replace": 1.0, "publish": 2.0, "asked": 4.0, "taken": 6.0}
    late = {"step": 2, "seconds": 10.0, "replace": 0.0, "publish": 1.0, "asked": 10.0, "taken": 16.0}
    steps = [
        early | {"gradient": 9.0, "groups": [group | {"key": 1}]},
        late | {"gradient": 19.0, "groups": [group | {"key": 2}]},
    ]
    # The second group came while the trainer waited. Of the reloads, only the second is a part of that.
    found = figures(steps, {1: 3.0, 2: 15.0}, [(7.0, 9.0), (11.0, 13.0), (15.5, 17.0)])
    waits = {"generator": 15.0, "reload": 10.0, "buffer": 20.0, "publication": 15.0}
    assert found["percent_of_a_step_waiting_for"] == waits
    assert found["milliseconds"]["reload of a version"]["p50"] == pytest.approx(2_000.0)
    assert found["milliseconds"]["scored to acknowledged"]["p50"] == pytest.approx(8_000.0)
    assert found["milliseconds"]["finished to gradient"]["p50"] == pytest.approx(14_000.0)


@pytest.mark.parametrize(
    ("shape", "read"),
    [
        # Of each of 32 completions the last token is not read: 4352 - 32 and the prompts, once for each group or row.
        ("single turn, G = 8", [4608, 4608, 6624]),
        # 8 rollouts of 224 tokens, in one sequence or four. The prompts alone leave so much that two passes read one.
        ("4 turns in 4 sequences a rollout", [2 * (64 + 8 * 223), 3 * 64 + 64 * 127, 64 * (64 + 127)]),
        ("a long common context", [256 + 2 * (32 + 264) + 1002, 2 * (288 + 8 * 264) + 1002, 16 * (288 + 264) + 1002]),
    ],
)
def test_the_shapes_of_the_benchmark_of_beginnings_are_read_as_far_as_each_side_shares_them(shape, read):
    batch = shared.to_batch(shared.SHAPES[shape]())
    assert [shared.computed(shared.sharing(batch, side)) for side in shared.SIDES] == read
    assert (shared.sharing(batch, "none").mask_BT == batch.mask_BT).all()

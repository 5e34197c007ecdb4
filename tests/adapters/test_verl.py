"""ServerReplayBuffer with verl's own ReplayBuffer, TransferQueue and Ray, in an environment of their own.

verl needs other versions of what we use, so it runs as another process. `.venv-verl` is used if it is there, and made
if REPLAY_MAKE_ENVIRONMENTS=1 is set; REPLAY_VERL_PYTHON names another Python that has verl.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
from pathlib import Path

import pytest

from benchmarks.environments import ROOT, BuiltEnvironment
from replay_adapters.hooks import RUN_WITH
from replay_client import ReplayClient
from replay_server import ReplayServer, TableConfig

VERL = BuiltEnvironment(
    ROOT / ".venv-verl",
    (
        *RUN_WITH["verl"].replace(" ", "==").split(",=="),
        *("cachetools", "fastapi", "uvicorn"),
        *("grpcio>=1.80,<1.84", "ml-dtypes>=0.5", "msgpack>=1.1", "protobuf>=6.33.5,<8", "xxhash>=3.5"),
    ),
)


def python_with_verl() -> str:
    if named := os.environ.get("REPLAY_VERL_PYTHON"):
        return named
    if os.environ.get("REPLAY_MAKE_ENVIRONMENTS") == "1":
        VERL.ensure()
    if not VERL.python.exists():
        pytest.skip("verl is not installed; REPLAY_MAKE_ENVIRONMENTS=1 pytest tests/adapters/test_verl.py")
    return str(VERL.python)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """What happened in both kinds of buffer, and what the server then held."""
    python, report = python_with_verl(), tmp_path_factory.mktemp("verl") / "report.json"
    names = ("sync", "colocate_async", "filtered", "agents")
    tables = [TableConfig(name=name, sampler="prioritized", max_size=64) for name in names]
    with ReplayServer(tables, port=0) as server, ReplayClient(server.address) as client:
        paths = os.pathsep.join(str(ROOT / name) for name in ("", "client", "trainer", "protos"))
        done = subprocess.run(
            [python, "-m", "tests.adapters.run_verl", server.address, str(report)],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": paths},
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        content = json.loads(Path(report).read_text())
        for table in ("sync", "colocate_async", "agents"):
            entry = content[table]
            keys = [item.key for item in client.list_items(table, order_by="age", descending=True).items]
            entry["stored"] = [item.group for item in client.get(keys)]
            entry["version"] = client.policy().version
    return content


@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", ["sync", "colocate_async"])
def test_a_group_without_variance_has_the_rows_of_a_stored_group(told, mode):
    first, second = told[mode]["steps"]
    assert first["metrics"]["replay/groups_missing"] == 1.0
    assert first["metrics"]["replay/groups_replaced"] == 0.0
    assert second["metrics"]["replay/groups_replaced"] == 1.0
    assert second["metrics"]["replay/fresh_zero_variance"] == 0.5
    assert second["metrics"]["replay/fresh_reward"] == pytest.approx(1 / 6)
    stored = first["rows"]
    for session in range(3):
        row, source = second["rows"][f"c_{session}_0"], stored[f"a_{session}_0"]
        names = ("prompts", "responses", "input_ids", "position_ids", "response_mask", "loss_mask", "rm_scores")
        assert {name: row[name] for name in names} == {name: source[name] for name in names}
        assert row["rollout_log_probs"] == pytest.approx(source["rollout_log_probs"])
        assert row["uid"] == "c"  # what verl groups by
        assert row["data_source"] == "set of c"
        assert {name: row["tag"][name] for name in ("prompt_len", "response_len", "seq_len")} == {
            name: source["tag"][name] for name in ("prompt_len", "response_len", "seq_len")
        }
        assert row["tag"]["min_global_steps"] == 1


@pytest.mark.parametrize("mode", ["sync", "colocate_async"])
def test_verls_own_correction_uses_the_stored_log_probabilities(told, mode):
    step = told[mode]["steps"][1]
    for key, weights in step["weights"].items():
        row = step["rows"][key]
        expected = [min(2.0, math.exp(-0.5 - logprob)) for logprob in row["rollout_log_probs"]]
        for weight, ratio, mask in zip(weights, expected, row["response_mask"], strict=True):
            assert weight == pytest.approx(ratio * mask, abs=1e-5)


@pytest.mark.parametrize("mode", ["sync", "colocate_async"])
def test_informative_groups_are_stored_and_validation_is_left_alone(told, mode):
    entry = told[mode]
    rows = {key: row for step in entry["steps"] for key, row in step["rows"].items()}
    assert [group.rewards.tolist() for group in entry["stored"]] == [[0.0, 1.0, 1.0], [1.0, 0.0, 0.0]]
    for name, group in zip("ad", entry["stored"], strict=True):
        for session, (prompt, span) in enumerate(zip(group.prompts(), group.sampled_spans(), strict=True)):
            row = rows[f"{name}_{session}_0"]
            assert prompt.tolist() == row["prompts"]  # which differ within the group
            assert group.completion_ids[span].tolist() == row["responses"]
            assert group.loss_mask[span].astype(int).tolist() == row["response_mask"]
        assert group.context_lengths.tolist() == [0, 1, 2]
    first, second = (group.policy_version for group in entry["stored"])
    assert second == first + 1
    assert sorted(entry["val"]["rows"]) == ["e_0_0", "e_1_0"]
    assert not any("replay" in name for name in entry["val"]["metrics"])


def test_group_filtering_and_refills_work_as_with_verls_own_buffer(told):
    filtered = told["filtered"]
    assert filtered["evicted"] == 1
    assert filtered["refills"] == [1]
    assert filtered["keys"] == ["r1_0_0", "r1_1_0", "r1_2_0"]
    assert filtered["refills_failed"]


def test_sessions_of_several_rows_and_columns_of_tokens_come_back_bit_by_bit(told):
    first, second = told["agents"]["steps"]
    assert first["replaced"] == 0.0
    assert second["replaced"] == 1.0
    keys = [f"{{}}_{session}_{index}" for session, count in enumerate((2, 1, 3)) for index in range(count)]
    assert list(second["rows"]) == [key.format("b") for key in keys]
    assert second["size"] == len(keys)
    assert second["left"] == sorted(second["rows"]), "rows that have no place any more are gone"
    for key in keys:
        row, source = second["rows"][key.format("b")], first["rows"][key.format("a")]
        own = ("of_prompt", "uid", "grade")  # columns of the prompt, which no group has
        assert {name: row[name] for name in row if name not in own} == {n: source[n] for n in source if n not in own}
        assert row["uid"] == "b"
        assert row["of_prompt"][1] == [72.0] * 7
        assert row["grade"] == "72.0"
        tags, sources = second["tags"][key.format("b")], first["tags"][key.format("a")]
        for name in ("prompt_len", "response_len", "seq_len", "status"):
            assert tags[name] == sources[name]
    dtypes = {name: value[0] for name, value in second["rows"]["b_0_0"].items() if name not in ("uid", "grade")}
    assert dtypes["routed_experts"] == "torch.int16"
    assert dtypes["entropies"] == "torch.bfloat16"


def test_columns_of_tokens_are_stored_with_their_axes(told):
    [group] = told["agents"]["stored"]
    assert group.sequence_counts.tolist() == [2, 1, 3]
    assert group.rewards.tolist() == [0.0, 1.0, 1.0]
    assert group.axes == {
        "routed_experts": "whole",
        "teacher_logprobs": "whole",
        "teacher_ids": "whole",
        "entropies": "token",
    }
    assert group.extras["routed_experts"].dtype.name == "uint8"

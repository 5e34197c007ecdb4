"""Which GPUs each part of a run sees. No GPU is needed: variables, and a stand-in for nvidia-smi."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from replay_cli.run.gpus import Gpus
from replay_cli.run.plan import read_run
from tests.cli.run.runs import write_run

UUIDS = [f"GPU-{number}aaa-bbbb" for number in range(8)]


@pytest.fixture
def machine(tmp_path):
    """The environment of a shell on a machine with eight GPUs."""
    return nvidia_smi(tmp_path, "".join(f"{index}, {uuid}\n" for index, uuid in enumerate(UUIDS)))


def nvidia_smi(folder: Path, says: str, status: int = 0) -> dict[str, str]:
    """The environment of a shell whose nvidia-smi says this."""
    program = folder / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{says}END\nexit {status}\n")
    program.chmod(0o755)
    environ = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    return environ | {"PATH": f"{program.parent}:{os.environ['PATH']}"}


@pytest.mark.parametrize(
    ("visible", "wanted", "found"),
    [
        (None, "0,1", ["0", "1"]),
        (None, "2-7", ["2", "3", "4", "5", "6", "7"]),
        (None, "0, 2-3", ["0", "2", "3"]),
        (None, 5, ["5"]),
        (None, [0, 3], ["0", "3"]),
        (None, UUIDS[2], ["2"]),
        (None, "GPU-2aaa", ["2"]),
        (None, "MIG-c6d4f1ef", ["MIG-c6d4f1ef"]),
        ("4,6", "0,1", ["4", "6"]),
        ("4,6", UUIDS[6], ["6"]),
        (f"{UUIDS[3]},{UUIDS[1]}", "1", [UUIDS[1]]),
        (f"{UUIDS[3]},{UUIDS[1]}", UUIDS[1], [UUIDS[1]]),
        ("MIG-a/1/0,MIG-b/2/0", "0-1", ["MIG-a/1/0", "MIG-b/2/0"]),
        ("1,-1,2", "0", ["1"]),
    ],
)
def test_a_number_counts_among_the_gpus_that_the_shell_sees(machine, visible, wanted, found):
    if visible is not None:
        machine["CUDA_VISIBLE_DEVICES"] = visible
    assert Gpus(machine).find(wanted) == found


@pytest.mark.parametrize(
    ("visible", "wanted", "why"),
    [
        (None, "8", "there is no GPU 8; nvidia-smi lists 8"),
        (None, "GPU-ffff", "there is no GPU GPU-ffff here: GPU-0aaa"),
        ("4,6", "2", "there is no GPU 2; CUDA_VISIBLE_DEVICES=4,6 shows 2"),
        ("4,6", UUIDS[5], f"there is no GPU {UUIDS[5]} here"),
        ("4,6", "MIG-a", "there is no GPU MIG-a here"),
        ("1,-1,2", "1", "CUDA_VISIBLE_DEVICES=1,-1,2 shows 1"),
        ("", "0", "CUDA_VISIBLE_DEVICES= shows 0"),
        ("-1", "0", "CUDA_VISIBLE_DEVICES=-1 shows 0"),
        ("NoDevFiles", "0", "CUDA_VISIBLE_DEVICES=NoDevFiles shows 0"),
        (None, f"2,{UUIDS[2]}", f"names the GPU {UUIDS[2]} twice"),
        (None, True, "True names no GPUs"),
        (None, "", "'' names no GPUs"),
        (None, [0.5], "names no GPUs"),
        (None, "0-99999", "is no range of GPUs"),
    ],
)
def test_a_gpu_that_is_not_there_is_one_line(machine, visible, wanted, why):
    if visible is not None:
        machine["CUDA_VISIBLE_DEVICES"] = visible
    with pytest.raises(ValueError) as raised:  # noqa: PT011  the words are compared
        Gpus(machine).find(wanted)
    assert why in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_machine_without_nvidia_smi_has_no_gpu(tmp_path):
    with pytest.raises(ValueError, match="there is none here: nvidia-smi is not on the PATH"):
        Gpus({"PATH": str(tmp_path)}).find("0")


def test_a_driver_that_fails_says_why(tmp_path):
    environ = nvidia_smi(tmp_path, "Failed to initialize NVML: Driver/library version mismatch\n", status=18)
    with pytest.raises(ValueError, match="there is none here: nvidia-smi says: Failed to initialize NVML"):
        Gpus(environ).find("0")


# ------------------------------------------------------------------------------------------------ through a run file


def plan_of(folder: Path, changes: dict[str, object], environ: dict[str, str]):
    return read_run(write_run(folder, {"train.groups_per_step": 30, **changes}), (), None, environ)


def seen(part) -> str | None:
    return part.environment.get("CUDA_VISIBLE_DEVICES")


def test_gpus_are_shared_out_among_the_generators_and_the_trainer_has_a_rank_for_each(tmp_path, machine):
    plan = plan_of(tmp_path, {"generate.gpus": "0,1", "train.gpus": "2-7"}, machine)
    assert [part.name for part in plan.generators] == ["generator-1", "generator-2"]
    assert [seen(part) for part in plan.generators] == ["0", "1"]
    assert seen(plan.trainer) == "2,3,4,5,6,7"
    assert plan.trainer.environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert plan.trainer.command[1:7] == (
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "6",
        "-m",
    )
    assert int(plan.trainer.environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) > 3600
    assert seen(plan.server) is None


def test_under_slurm_numbers_are_those_of_the_job(tmp_path, machine):
    machine["CUDA_VISIBLE_DEVICES"] = f"{UUIDS[4]},{UUIDS[2]}"
    plan = plan_of(tmp_path, {"generate.gpus": 0, "train.gpus": 1}, machine)
    assert seen(plan.generators[0]) == UUIDS[4]
    assert seen(plan.trainer) == UUIDS[2]
    assert "CUDA_DEVICE_ORDER" not in plan.trainer.environment
    assert "torch.distributed.run" not in plan.trainer.command


def test_tensor_parallelism_takes_several_gpus_a_process(tmp_path, machine):
    changes = {"generate.gpus": "0-3", "generate.engine_arg": {"tensor_parallel_size": 2}, "train.gpus": "4"}
    plan = plan_of(tmp_path, changes, machine)
    assert [seen(part) for part in plan.generators] == ["0,1", "2,3"]


def test_without_gpus_the_environment_stays_as_it_is(tmp_path):
    plan = plan_of(tmp_path, {"generate.processes": 2}, {"PATH": str(tmp_path)})
    assert [dict(part.environment) for part in plan.parts] == [{}, {}, {}, {}]


def test_transformers_and_the_trainer_may_share_the_first_gpu(tmp_path, machine):
    plan = plan_of(tmp_path, {"generate.engine": "transformers"}, machine)
    assert [dict(part.environment) for part in plan.parts] == [{}, {}, {}]


@pytest.mark.parametrize(
    ("changes", "shares"),
    [
        ({"generate.gpus": "0", "train.gpus": "0"}, [0.45]),
        ({"generate.gpus": "0", "train.gpus": "0", "generate.processes": 3}, [0.15] * 3),
        ({"generate.gpus": "0", "train.gpus": "1", "generate.processes": 3}, [0.3] * 3),
        ({"generate.gpus": "0,1", "train.gpus": "1"}, [None, 0.45]),
        ({"train.gpus": "0"}, [0.45]),
        ({}, [0.45]),
        ({"train.device": "cpu"}, [None]),
        ({"generate.gpus": "0", "train.gpus": "1"}, [None]),
        ({"generate.gpus": "0", "train.gpus": "0", "generate.engine": "transformers"}, [None]),
        ({"generate.gpus": "0", "train.gpus": "0", "generate.engine_arg": ["gpu_memory_utilization=0.3"]}, [0.3]),
    ],
)
def test_vllm_takes_a_part_of_the_memory_of_a_gpu_that_others_use(tmp_path, machine, changes, shares):
    plan = plan_of(tmp_path, {"shared_gpus": True, **changes}, machine)
    found = []
    for path, text in plan.files.items():
        if path.name.startswith("generate"):
            lines = [line for line in text.splitlines() if line.startswith("gpu_memory_utilization")]
            found.append(float(lines[0].partition("=")[2]) if lines else None)
    assert found == shares

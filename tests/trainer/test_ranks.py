"""Several ranks over gloo: the same groups give the same weights as on one, whole or partitioned, resumed or not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from replay_trainer.weights import WEIGHTS_FILE, published
from tests.kit.models import NEAR, assert_same_weights
from tests.kit.processes import run_ranks
from tests.kit.trainers import lines_of
from tests.trainer.run_rank import main

pytestmark = pytest.mark.timeout(1000)  # a guard against hanging; two processes start where others may be busy
OPTIONS: dict[str, Any] = {
    "max_steps": 3,
    "groups_per_step": 4,
    "learning_rate": 0.1,
    "sgd": True,
    "zero_variance_groups": 0,
    "pool_groups": 6,
    "max_tokens_per_micro_batch": 20,
}


def run(folder: Path, ranks: int, **options: Any) -> dict[str, torch.Tensor]:
    """The weights that `ranks` processes train; one trains in this process."""
    folder.mkdir(exist_ok=True)
    (folder / "options.json").write_text(json.dumps(OPTIONS | options))
    if ranks == 1:
        main(folder)
    else:
        said = run_ranks(ranks, main, folder)
        assert said == [""] * ranks, "\n".join(said)
    weights: dict[str, torch.Tensor] = torch.load(folder / "weights.pt", weights_only=True)
    return weights


def metrics(folder: Path) -> list[dict[str, Any]]:
    return lines_of(folder / "out")


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"loss_type": "dapo"}, marks=pytest.mark.long),
        {"loss_type": "grpo", "num_iterations": 2, "fsdp": True, "beta": 0.1, "tied": True},
        pytest.param(
            {
                "loss_type": "bnpo",
                "scale_rewards": "batch",
                "correction": {"level": "sequence", "batch_normalize": True},
            },
            marks=pytest.mark.long,
        ),
        pytest.param(
            {"loss_type": "dr_grpo", "max_completion_length": 8, "fsdp": True, "gradient_checkpointing": True},
            marks=pytest.mark.long,
        ),
        {"loss_type": "gspo", "fsdp": True, "beta": 0.1, "pieces": True, "max_tokens_per_micro_batch": 6},
        # The first of two ranks is left without any group.
        pytest.param(
            {"fsdp": True, "zero_variance_groups": 2, "pool_groups": 0, "replay_on_empty": "drop"},
            marks=pytest.mark.long,
        ),
        {"max_token_staleness": 1, "lag": 3},
        {"fsdp": True, "groups_per_step": 8, "replay_share": 0.5, "replay_max_drift": 0.3, "zero_variance_groups": 1},
    ],
    ids=[
        "dapo",
        "grpo partitioned and tied",
        "bnpo",
        "dr_grpo partitioned",
        "gspo of rollouts in pieces",
        "an idle rank",
        "tokens that are too old",
        "a share of replay",
    ],
)
def test_two_ranks_train_what_one_trains(tmp_path, options):
    one, two = run(tmp_path / "one", 1, **options), run(tmp_path / "two", 2, **options)
    assert_same_weights(one, two, **NEAR)
    first, second = metrics(tmp_path / "one"), metrics(tmp_path / "two")
    assert len(first) == 3
    assert len(second) == 3
    for a, b in zip(first, second, strict=True):
        assert a.keys() == b.keys()
        for name, value in a.items():
            if value is None:
                assert b[name] is None
            elif not name.startswith("time/") and name != "train/tokens_per_second":
                assert b[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
    saved = AutoModelForCausalLM.from_pretrained(published(tmp_path / "two/out")[-1])
    assert_same_weights({f"model.{name}": tensor for name, tensor in saved.state_dict().items()}, two, **NEAR)


def test_ranks_of_partitioned_weights_compute_in_bfloat16_and_keep_float32(tmp_path):
    run(tmp_path / "one", 1, max_steps=2)
    weights = run(tmp_path / "two", 2, max_steps=2, fsdp=True, bf16=True)
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    for a, b in zip(metrics(tmp_path / "one"), metrics(tmp_path / "two"), strict=True):
        for name in ("train/loss", "train/grad_norm", "train/entropy", "correction/kl"):
            assert b[name] == pytest.approx(a[name], rel=1e-2)
            assert b[name] != a[name]


@pytest.mark.long
def test_a_run_resumes_on_the_same_and_on_another_number_of_ranks(tmp_path):
    options = {"sgd": False, "learning_rate": 1e-3, "fsdp": True, "max_steps": 4}
    whole = run(tmp_path / "whole", 1, **options)
    counting = {"resume": True, "count_bytes": True}
    run(tmp_path / "parts", 1, **options | {"max_steps": 1})
    run(tmp_path / "parts", 2, **options | counting | {"max_steps": 2})
    of_whole = bytes_of_ranks(tmp_path / "parts")
    run(tmp_path / "parts", 2, **options | counting | {"max_steps": 3})
    of_parts = bytes_of_ranks(tmp_path / "parts")
    assert_same_weights(run(tmp_path / "parts", 1, **options | {"resume": True}), whole, **NEAR)
    assert [line["step"] for line in metrics(tmp_path / "parts")] == [1, 2, 3, 4]
    for ranks in (of_parts, of_whole):
        # Weights and two tensors of AdamW for each: a rank reads its half of every one.
        reads = [rank["read"] for rank in ranks]
        assert len(reads[0]) == len(reads[1]) == 3 * len(whole)
        for (first, full), (second, same) in zip(*reads, strict=True):
            assert full == same == first + second
            assert abs(first - second) <= full // 2
        assert sum(own for own, _ in reads[0]) < 0.51 * sum(full for _, full in reads[0])
    everything = sum(full for _, full in of_parts[0]["read"])
    for index, rank in enumerate(of_parts):
        assert rank["files"] == ["model.safetensors", f"rank-{index}-of-2.safetensors"]  # its own alone of the rows
        assert 0.3 * everything < rank["copied"][0] < 0.35 * everything  # half of the two tensors of AdamW
    assert [rank["files"] for rank in of_whole] == [["model.safetensors"]] * 2  # the state of one rank is in trainer.pt


def bytes_of_ranks(folder: Path) -> list[dict[str, list[Any]]]:
    return [json.loads((folder / f"bytes-{rank}.json").read_text()) for rank in range(2)]


def test_a_batch_that_does_not_divide_by_the_ranks_is_refused(tmp_path):
    with pytest.raises(AssertionError, match="groups_per_step=3 must be a multiple of the 2 ranks"):
        run(tmp_path / "two", 2, groups_per_step=3)


@pytest.mark.parametrize("fsdp", [False, True], ids=["whole", "partitioned"])
def test_two_ranks_train_the_same_adapter_as_one(tmp_path, fsdp):
    options = {"lora": True, "beta": 0.1, "fsdp": fsdp}
    alone, together = (run(tmp_path / str(ranks), ranks, **options) for ranks in (1, 2))
    assert any("lora_B" in name and tensor.abs().max() > 1e-4 for name, tensor in alone.items())
    assert_same_weights(together, alone, **NEAR)
    assert_same_weights(*(load_file(published(tmp_path / ranks / "out")[-1] / WEIGHTS_FILE) for ranks in "12"), **NEAR)


@pytest.mark.long
def test_a_run_with_a_partitioned_adapter_resumes_on_the_same_and_on_another_number_of_ranks(tmp_path):
    options = {"lora": True, "sgd": False, "learning_rate": 1e-3, "fsdp": True, "max_steps": 4}
    whole = run(tmp_path / "whole", 1, **options)
    for steps, ranks in ((1, 1), (2, 2), (3, 2)):
        run(tmp_path / "parts", ranks, **options | {"resume": steps > 1, "max_steps": steps})
    assert_same_weights(run(tmp_path / "parts", 1, **options | {"resume": True}), whole, **NEAR)

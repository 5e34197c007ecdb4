"""On-policy distillation: what a teacher says of each token is its advantage, and the student moves to the teacher."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from replay_client import ReplayClient, RolloutGroup
from replay_client.errors import DeadlineExceededError
from replay_client.scoring import carries_gradient
from replay_client.testing import make_group
from replay_server import ReplayServer, TableConfig
from replay_trainer import GRPOTrainer
from replay_trainer.batching import to_batch
from replay_trainer.config import Teacher
from replay_trainer.groups import ModelLimits, why_unusable
from replay_trainer.losses import distillation_advantages
from tests.kit.clients import FakeClient
from tests.kit.groups import make_sample
from tests.kit.models import make_model
from tests.kit.trainers import lines_of, make_trainer
from tests.trainer.test_sequences import agents, by_hand, gradient_of

COLUMN = "teacher_logprobs"
TEACHER = Teacher(COLUMN, 0.5)


def taught(group: RolloutGroup, values: Any = None, axis: str | None = "token") -> RolloutGroup:
    """The group with the column of a teacher; NaN for tokens that are not trained on, unless `values` are given."""
    if values is None:
        values_T = np.random.default_rng(group.num_tokens).uniform(-4, -0.1, group.num_tokens).astype(np.float32)
        values = np.where(group.trained_mask, values_T, np.float32(np.nan))
    return replace(group, extras={COLUMN: values}, axes={} if axis is None else {COLUMN: axis})


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("size", [1, 14, 1000], ids=["a row at a time", "some rows", "all rows at once"])
@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "gspo"])
def test_the_step_of_a_student_is_that_of_a_loop(tmp_path, loss_type, size, packing):
    groups = list(map(taught, agents()))
    gradient, metrics = gradient_of(
        groups,
        tmp_path,
        loss_type=loss_type,
        teacher_weight=0.5,
        packing=packing,
        max_tokens_per_micro_batch=size,
    )
    loss, expected = by_hand(groups, loss_type, COLUMN)
    assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-6)
    torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=1e-4)


def test_advantages_of_rollouts_and_of_tokens_are_mixed_with_the_teachers():
    old_BT, teacher_BT = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]]), torch.tensor([[-1.5, torch.nan], [-1.0, -4.0]])
    mask_BT = torch.tensor([[True, False], [True, True]])
    for advantages in (torch.tensor([1.0, -1.0]), torch.tensor([[1.0, 1.0], [-1.0, -1.0]])):
        mixed_BT = distillation_advantages(advantages, old_BT, teacher_BT, mask_BT, weight=2.0)
        assert mixed_BT.tolist() == [[0.0, 1.0], [3.0, -1.0]]


def test_a_correction_that_judges_by_advantage_sees_what_the_loss_sees():
    batch = to_batch([taught(make_group(rewards=[1.0, 1.0], completions=[[5], [6]]), np.float32([-1, -3]))], "cpu")
    assert torch.equal(batch.advantages_under(torch.full((2, 1), -2.0)), torch.zeros(2))
    student = to_batch(
        [taught(make_group(rewards=[1.0, 1.0], completions=[[5], [6]]), np.float32([-1, -3]))], teacher=TEACHER
    )
    assert student.advantages_under(torch.full((2, 1), -2.0)).tolist() == [[0.5], [-0.5]]


EQUAL = make_group(rewards=[1.0, 1.0], completions=[[5, 6], [7]], logprobs=-2.5)


@pytest.mark.parametrize("scale", [None, "group", "batch"])
@pytest.mark.parametrize("rule", ["replace", "dynamic"])
def test_a_group_of_equal_rewards_trains_a_student(tmp_path, rule, scale):
    pool = [make_sample(taught(make_group(rewards=[1.0, 0.0])), key=2)]
    lines, models = [], []
    for weight in (0.0, 0.5):
        options = {"teacher_weight": weight, "zero_variance": rule, "scale_rewards": scale}
        few = {"max_steps": 1, "groups_per_step": 1, "max_dynamic_batches": 1}
        client = FakeClient([[make_sample(taught(EQUAL), key=1)]], pool=pool)
        trainer = make_trainer(client, tmp_path / str(weight), **few, **options)
        trainer.train()
        lines.append(lines_of(tmp_path / str(weight))[0])
        models.append(trainer.model)
    without, with_teacher = lines
    assert without["fresh/zero_variance_fraction"] == 1.0
    assert without["replay/groups_replaced"] == (rule == "replace")
    assert "train/teacher_kl" not in without
    assert with_teacher["fresh/zero_variance_fraction"] == 0.0
    assert with_teacher["train/zero_variance_fraction"] == 0.0
    assert with_teacher["replay/groups_replaced"] == 0
    assert with_teacher["train/tokens"] == 3
    logprobs_BT, _ = trainer.policy(batch := to_batch([taught(EQUAL)], teacher=TEACHER))
    assert not torch.equal(models[1].lm_head.weight, make_model().lm_head.weight)
    difference = (logprobs_BT - batch.teacher_logprobs_BT)[batch.mask_BT].mean().item()
    assert with_teacher["train/teacher_kl"] == pytest.approx(difference, abs=0.5)  # before the step, and not after it


def test_a_column_informs_only_who_distils_from_it():
    nothing_trained = replace(taught(EQUAL), loss_mask=np.zeros(3, np.bool_))
    assert not carries_gradient(taught(EQUAL))
    assert carries_gradient(taught(EQUAL), "group", COLUMN)
    assert not carries_gradient(taught(EQUAL), "group", "other")
    assert not carries_gradient(nothing_trained, "group", COLUMN)


BAD = {
    "absent": (EQUAL, r"it has no column 'teacher_logprobs' .*requires = \['teacher_logprobs'\]"),
    "no axis": (taught(EQUAL, axis=None), r"has the shape \(3,\) and the axis None: .* each of the 3 tokens"),
    "another axis": (taught(EQUAL, np.zeros(2, np.float32), "rollout"), r"the shape \(2,\) and the axis 'rollout'"),
    "top-k": (taught(EQUAL, np.zeros((3, 4), np.float32)), r"has the shape \(3, 4\) and the axis 'token'"),
    "unknown": (taught(EQUAL, np.float32([-1, np.nan, -1])), "holds nan at token 1, which must be finite"),
    "impossible": (taught(EQUAL, np.float32([-1, -2, -np.inf])), "holds -inf at token 2"),
    "above 0": (taught(EQUAL, np.float32([0.5, -2, -1])), r"holds 0\.5 at token 0, .* not above 0"),
}


@pytest.mark.parametrize(("group", "words"), BAD.values(), ids=BAD)
def test_a_group_that_no_student_can_use_is_put_aside_by_name(tmp_path, caplog, group, words):
    assert why_unusable(make_sample(group)) == ""
    assert why_unusable(make_sample(group), ModelLimits(teacher=COLUMN))
    with pytest.raises(ValueError, match=words):
        to_batch([group], teacher=TEACHER)
    client = FakeClient([[make_sample(group, key=77), make_sample(taught(EQUAL), key=1)]])
    make_trainer(client, tmp_path, max_steps=1, groups_per_step=2, teacher_weight=0.5).train()
    assert [(line["train/groups"], line["train/groups_unusable"]) for line in lines_of(tmp_path)] == [(1, 1)]
    (said,) = [message for message in caplog.messages if "rejected" in message]
    assert re.search(f"key 77 of table 'rollouts': .*{words}", said)


@pytest.mark.parametrize("kind", ["float16", "float64"])
def test_a_column_of_any_precision_is_read_and_contexts_need_none(kind):
    group = taught(agents()[0])
    group.extras[COLUMN] = group.extras[COLUMN].astype(kind)
    batch = to_batch([group], teacher=TEACHER)
    assert batch.teacher_logprobs_BT is not None
    expected = group.extras[COLUMN][group.trained_mask].astype(np.float32)
    np.testing.assert_array_equal(batch.teacher_logprobs_BT[batch.mask_BT].numpy(), expected)


# ------------------------------------------------------------------------------------------------------ a real server

PROMPTS = ([3, 4], [5], [9, 8, 7])


@torch.no_grad()
def next_logprobs(model: Any, prompt: Sequence[int], written_BT: torch.Tensor) -> torch.Tensor:
    """(B, V) of the token after the prompt and each row of `written_BT`."""
    prompt_BP = torch.tensor([list(prompt)]).expand(len(written_BT), -1)
    logprobs_BV: torch.Tensor = model(torch.cat([prompt_BP, written_BT], 1)).logits[:, -1].log_softmax(-1)
    return logprobs_BV


def reverse_kl(student: Any, teacher: Any) -> float:
    """KL(student || teacher) of the first token, exactly, in the mean over the prompts."""
    total, nothing = 0.0, torch.zeros(1, 0, dtype=torch.int64)
    for prompt in PROMPTS:
        mine, theirs = (next_logprobs(each, prompt, nothing) for each in (student, teacher))
        total += float((mine.exp() * (mine - theirs)).sum())
    return total / len(PROMPTS)


def teach(client: ReplayClient, teacher: Any, ended: threading.Event) -> None:
    """Brings the column to every group until the end, as docs/how-to/trajectories.md says."""
    while not ended.is_set():
        try:
            samples = client.sample("teacher", 1, timeout=0.2, lease=60.0)
        except DeadlineExceededError:
            continue
        group = samples[0].group
        tokens_BT = torch.tensor(np.stack(group.completions()).astype(np.int64))
        column = [
            next_logprobs(teacher, group.prompt_ids.tolist(), tokens_BT[:, :t]).gather(1, tokens_BT[:, t, None])
            for t in range(tokens_BT.shape[1])
        ]
        client.extend(samples[0], {COLUMN: torch.cat(column, 1).flatten().numpy()}, axes={COLUMN: "token"})
        client.acknowledge(samples)


@contextmanager
def teaching(address: str, teacher: Any) -> Iterator[None]:
    ended = threading.Event()
    with ReplayClient(address) as client:
        thread = threading.Thread(target=teach, args=(client, teacher, ended))
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def write(client: ReplayClient, model: Any, random: torch.Generator) -> None:
    """A group of 32 completions of two tokens for each prompt, written by `model`. All rewards are 0."""
    for prompt in PROMPTS:
        tokens_BT, logprobs_BT = torch.zeros(32, 0, dtype=torch.int64), torch.zeros(32, 0)
        for _ in range(2):
            known_BV = next_logprobs(model, prompt, tokens_BT)
            token_B1 = torch.multinomial(known_BV.exp(), 1, generator=random)
            tokens_BT = torch.cat([tokens_BT, token_B1], 1)
            logprobs_BT = torch.cat([logprobs_BT, known_BV.gather(1, token_B1)], 1)
        logprobs = logprobs_BT.flatten().tolist()
        group = make_group(rewards=[0.0] * 32, prompt=prompt, completions=tokens_BT.tolist(), logprobs=logprobs)
        client.insert(group, {"rollouts": 1.0, "teacher": 1.0})


def test_a_student_moves_to_the_teacher_that_extends_its_groups_on_a_real_server(tmp_path):
    queue = {"type": "queue", "max_size": 64}
    tables = [
        TableConfig(name="rollouts", rate_limiter=queue, requires=[COLUMN]),
        TableConfig(name="teacher", rate_limiter=queue),
    ]
    teacher, random = make_model(seed=5), torch.Generator().manual_seed(0)
    teacher.lm_head.weight.data *= 8  # a teacher that knows what it wants: with random weights all tokens are alike
    with ReplayServer(tables, port=0) as server, ReplayClient(server.address) as client:
        trainer: GRPOTrainer

        def write_more(_: dict[str, float]) -> None:
            write(client, trainer.model, random)

        options = {"max_steps": 16, "learning_rate": 1e-2, "groups_per_step": len(PROMPTS), "teacher_weight": 1.0}
        quiet = {"publish_every": 16, "sample_timeout": 60.0, "prefetch": 0, "zero_variance": "dynamic"}
        trainer = make_trainer(client, tmp_path, on_step=write_more, **options, **quiet)
        before = reverse_kl(trainer.model, teacher)
        with teaching(server.address, teacher):
            write(client, trainer.model, random)
            trainer.train()
        after = reverse_kl(trainer.model, teacher)
    lines = lines_of(tmp_path)
    assert [line["train/zero_variance_fraction"] for line in lines] == [0.0] * 16
    assert all("train/teacher_kl" in line for line in lines)
    assert after < before / 2

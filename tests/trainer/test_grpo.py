"""The whole step on a tiny model: it learns, can be cut into parts, killed and resumed, and stops before it breaks."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from replay_client import RolloutGroup, Sample
from replay_client.run_metrics import SECTIONS
from replay_client.scoring import group_priority
from replay_client.testing import make_group
from replay_dashboard.configuration import configuration_of
from replay_trainer import PRESETS, GRPOConfig, GRPOTrainer, LossConfig, TableEvaluation
from replay_trainer.batching import to_batch
from replay_trainer.correction import CorrectionConfig, Rejection
from replay_trainer.logprobs import LogprobModel
from replay_trainer.weights import probe_tokens, publish_weights, published, saved
from tests.kit.clients import FakeClient, OnlineClient
from tests.kit.groups import make_sample
from tests.kit.models import assert_same_weights, make_model, probe_difference
from tests.kit.trainers import Killed, killed_in, lines_of, make_batches, make_trainer

ALL_WRONG = [0.0] * 3


def logprobs_of(model: Any, groups: Sequence[RolloutGroup]) -> torch.Tensor:
    """(T,) current log-probabilities of all completion tokens."""
    batch = to_batch(groups)
    with torch.no_grad():
        return LogprobModel(model)(batch)[0][batch.mask_BT]


def test_training_raises_the_reward(tmp_path):
    model = make_model()
    client = OnlineClient(model, prompts=[[4, 5], [6], [8, 3, 3], [9, 9]], group_size=8)
    trainer = make_trainer(client, tmp_path, model=model, max_steps=25, groups_per_step=8, learning_rate=1e-2)
    trainer.train()
    rewards = [line["fresh/reward_mean"] for line in lines_of(tmp_path)]
    assert sum(rewards[:3]) / 3 < 0.25
    assert sum(rewards[-3:]) / 3 > 0.75
    assert sum(line["replay/groups_replaced"] for line in lines_of(tmp_path)) > 0
    # Rewards and log-probabilities of fresh groups are on policy; what was replaced is not.
    assert lines_of(tmp_path)[0]["correction/ratio_mean"] == pytest.approx(1.0, abs=1e-4)


def test_the_old_policy_is_the_one_before_the_first_update_of_the_step(tmp_path):
    model = make_model()
    group = make_group(rewards=[1.0, 0.0], completions=[[5, 6], [7]])
    group.rollout_logprobs[:] = logprobs_of(model, [group]).numpy() - math.log(1.5)
    client = FakeClient([[make_sample(group)]])
    make_trainer(client, tmp_path, model=model, max_steps=1, num_iterations=3, learning_rate=1e-2).train()
    (metrics,) = lines_of(tmp_path)
    assert metrics["correction/ratio_min"] == pytest.approx(1.5, rel=1e-4)
    assert metrics["correction/ratio_max"] == pytest.approx(1.5, rel=1e-4)
    assert metrics["train/approx_kl"] > 1e-4  # of the last iteration: two updates away from the old policy


def test_the_settings_of_a_run_stand_beside_its_metrics_and_a_model_that_is_there_keeps_its_own(tmp_path):
    client = FakeClient([[make_sample(make_group(rewards=[0.0, 1.0]))]])
    correction = CorrectionConfig(clip_min=1.0, clip_max=1.0)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    make_trainer(client, tmp_path, max_steps=1, learning_rate=3e-4, correction=correction).train()
    assert (tmp_path / "config.json").read_text() == '{"model_type": "qwen2"}'
    settings = configuration_of(tmp_path, tmp_path)
    assert settings["train.learning_rate"] == "0.0003"
    assert settings["train.correction.clip_max"] == "1.0"
    assert settings["train.max_steps"] == "1"
    assert "train.model_type" not in settings


def test_a_replaced_group_is_corrected_by_its_own_samplers_logprobs(tmp_path):
    model = make_model()
    stored = make_group(rewards=[0.0, 1.0, 1.0], prompt=[9, 8, 7], completions=[[5], [6, 7], [8, 9, 10, 11]])
    stored.rollout_logprobs[:] = logprobs_of(model, [stored]).numpy() - math.log(4.0)
    fresh = make_group(rewards=ALL_WRONG)
    client = FakeClient([[make_sample(fresh, key=1)]], pool=[make_sample(stored, key=2, age=7.0, staleness=3)])
    make_trainer(client, tmp_path, model=model, max_steps=1).train()
    (metrics,) = lines_of(tmp_path)
    assert metrics["train/tokens"] == 7
    assert metrics["correction/ratio_min"] == pytest.approx(4.0, rel=1e-4)
    assert metrics["correction/clipped_fraction"] == 1.0
    assert metrics["replay/age_mean"] == 7.0
    assert metrics["replay/staleness_mean"] == 3.0
    assert metrics["fresh/reward_mean"] == 0.0
    assert metrics["fresh/zero_variance_fraction"] == 1.0
    assert metrics["train/reward_mean"] == pytest.approx(2 / 3)
    assert metrics["train/zero_variance_fraction"] == 0.0


@pytest.mark.parametrize("replay_on_empty", ["keep", "drop"])
def test_a_step_without_any_variance_is_done_and_changes_nothing(tmp_path, replay_on_empty):
    client = FakeClient([[make_sample(make_group(rewards=ALL_WRONG))]])
    trainer = make_trainer(client, tmp_path, max_steps=1, replay_on_empty=replay_on_empty)
    trainer.train()
    assert_same_weights(trainer.model, make_model())
    assert client.version == 1
    (metrics,) = lines_of(tmp_path)
    assert metrics["replay/groups_missing"] == 1
    assert metrics["train/rows"] == (3 if replay_on_empty == "keep" else 0)
    assert metrics["train/loss"] == 0.0
    assert metrics["train/grad_norm"] == 0.0
    assert metrics["replay/age_mean"] is None  # nothing to take the mean of


def test_saving_weights_draws_no_progress_bar(tmp_path, capfd):
    make_trainer(FakeClient(make_batches(1)), tmp_path, max_steps=1).train()
    make_trainer(FakeClient(make_batches(1)), tmp_path, max_steps=1, resume=True).train()
    assert capfd.readouterr() == ("", "")


def test_the_reference_of_the_kl_is_the_model_as_it_was_handed_over(tmp_path):
    make_trainer(FakeClient(make_batches(2)), tmp_path, max_steps=2, beta=0.5, learning_rate=1e-2).train()
    first, second = lines_of(tmp_path)
    assert first["train/kl"] == pytest.approx(0.0, abs=1e-6)
    assert second["train/kl"] > 1e-4


def test_every_version_is_published_before_the_next_step(tmp_path):
    client = FakeClient(make_batches(4))
    seen = []

    def on_step(metrics: dict[str, float]) -> None:
        # Called before the version of this step is published: the server is one behind, its weights are there.
        seen.append((metrics["step"], client.version, Path(client.weights).name))

    options = {"max_steps": 4, "keep_weights": 2, "publish_in_background": False}
    trainer = make_trainer(client, tmp_path, on_step=on_step, **options)
    trainer.train()
    assert seen == [(1, 0, "step-0"), (2, 1, "step-1"), (3, 2, "step-2"), (4, 3, "step-3")]
    assert [folder.name for folder in published(tmp_path)] == ["step-3", "step-4"]
    assert client.version == 4
    loaded = AutoModelForCausalLM.from_pretrained(client.weights)
    assert_same_weights(loaded, trainer.model)


SHARE = {"max_steps": 4, "groups_per_step": 6, "replay_share": 0.5, "replay_max_drift": 3.0}


KILLED: dict[str, tuple[int, dict[str, Any], int]] = {
    "on a server that was restarted from something older": (4, {"max_steps": 5, "beta": 0.1}, 2),
    "with a version every second step": (4, {"max_steps": 5, "beta": 0.1, "publish_every": 2}, 2),
    "with a training checkpoint every third step": (6, {"max_steps": 7, "save_every": 3, "keep_weights": 2}, 5),
    "with a share of replay": (3, SHARE | {"zero_variance": "replace"}, 2),
    "with dynamic sampling": (3, SHARE | {"zero_variance": "dynamic", "max_dynamic_batches": 1}, 2),
}


@pytest.mark.parametrize(("step", "options", "server"), KILLED.values(), ids=KILLED)
def test_a_killed_run_resumes_without_repeating_or_skipping_a_step(tmp_path, step, options, server):
    steps, killed = options["max_steps"], tmp_path / "killed"
    batches, (stored,) = make_batches(steps + 1), make_batches(1, seed=9, groups=9)
    pool = [make_sample(sample.group, key=1000 + index) for index, sample in enumerate(stored)]
    whole = make_trainer(FakeClient(batches, pool), tmp_path / "whole", **options)
    whole.train()
    client = FakeClient(batches, pool)
    with pytest.raises(Killed):
        make_trainer(client, killed, on_step=killed_in(step), **options).train()
    if "save_every" in options:  # the state of step 3 outlives keep_weights
        assert [folder.name for folder in published(killed)] == ["step-3", "step-4", "step-5"]
        assert [folder.name for folder in saved(killed)] == ["step-3"]
        assert [folder.name for folder in saved(tmp_path / "whole")] == ["step-6", "step-7"]
        assert client.version == server
    # As a process killed while it writes leaves them: half a line, and half a folder.
    with (killed / "metrics.jsonl").open("a") as file:
        file.write(f'{{"step": {step + 1}, "tr')
    (killed / f"step-{step}.tmp").mkdir(exist_ok=True)
    (killed / f"step-{step}.tmp/model.safetensors").write_bytes(b"half")
    client.version = server
    resumed = make_trainer(client, killed, resume=True, **options)
    resumed.train()
    assert [line["step"] for line in lines_of(killed)] == list(range(1, steps + 1))
    assert [line["step"] for line in lines_of(killed, "steps.jsonl")] == list(range(1, steps + 1))
    for name in ("train/loss", "replay/groups_added"):
        assert [line[name] for line in lines_of(killed)] == [line[name] for line in lines_of(tmp_path / "whole")]
    assert lines_of(killed)[-1]["replay/groups_added"] == (3 if "replay_share" in options else 0)
    assert_same_weights(resumed.model, whole.model)
    assert client.version == steps


def test_the_servers_checkpoint_is_remembered_with_the_state_it_belongs_to(tmp_path):
    client = FakeClient(make_batches(4))
    make_trainer(client, tmp_path, max_steps=4, save_every=2, checkpoint_server=True).train()
    assert client.checkpoints == ["auto-0", "auto-1", "auto-2"]  # with versions 0, 2 and 4
    make_trainer(FakeClient(make_batches(1)), tmp_path / "without", max_steps=1).train()
    manifests = [
        json.loads((tmp_path / f"{folder}/manifest.json").read_text()) for folder in ("step-4", "without/step-1")
    ]
    assert [manifest["server_checkpoint"] for manifest in manifests] == ["auto-2", ""]


@pytest.mark.parametrize(
    ("lost", "whole_file"), [("trainer.pt", False), ("model.safetensors", True), ("config.json", False)]
)
def test_a_damaged_state_is_passed_over_with_a_warning_and_done_again(tmp_path, caplog, lost, whole_file):
    client = FakeClient(make_batches(3))
    make_trainer(client, tmp_path, max_steps=2).train()
    file = tmp_path / "step-2" / lost
    content = file.read_bytes()
    file.unlink() if whole_file else file.write_bytes(content[: len(content) // 2])
    make_trainer(client, tmp_path, max_steps=3, resume=True).train()
    assert f"{tmp_path / 'step-2'} has lost files or parts of them: it is passed over for step-1" in caplog.messages
    assert [line["step"] for line in lines_of(tmp_path)] == [1, 2, 3]
    assert [folder.name for folder in saved(tmp_path)] == ["step-1", "step-2", "step-3"]
    AutoModelForCausalLM.from_pretrained(tmp_path / "step-2")


def test_a_state_that_was_moved_away_leaves_the_one_before_to_resume_from(tmp_path):
    client = FakeClient(make_batches(3))
    make_trainer(client, tmp_path / "run", max_steps=2).train()
    (tmp_path / "run/step-2/manifest.json").write_text('{"version": 2, "fi')
    with pytest.raises(ValueError, match=r"manifest.json is damaged .*: move step-2 out of its folder"):
        make_trainer(client, tmp_path / "run", max_steps=3, resume=True).train()
    (tmp_path / "run/step-2").rename(tmp_path / "away")
    make_trainer(client, tmp_path / "run", max_steps=3, resume=True).train()
    assert [line["step"] for line in lines_of(tmp_path / "run")] == [1, 2, 3]


def test_resuming_a_finished_run_announces_its_weights_again(tmp_path):
    make_trainer(FakeClient(make_batches(2)), tmp_path, max_steps=2).train()
    restarted = FakeClient(make_batches(2))
    make_trainer(restarted, tmp_path, max_steps=2, resume=True).train()
    assert restarted.version == 2
    assert Path(restarted.weights).name == "step-2"
    assert len(lines_of(tmp_path)) == 2


def test_a_fresh_start_refuses_the_folder_of_another_run(tmp_path):
    make_trainer(FakeClient(make_batches(2)), tmp_path, max_steps=1).train()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(FileExistsError, match=r"holds step-1 of an earlier run: set resume=True"):
        make_trainer(FakeClient(make_batches(2)), tmp_path).train()
    assert sorted(tmp_path.rglob("*")) == before


def test_a_fresh_start_refuses_a_server_that_is_ahead(tmp_path):
    client = FakeClient(make_batches(2), version=7)
    with pytest.raises(
        RuntimeError,
        match=r"server is at policy version 7, this run at 0: continue that run .* `replay table reset --all`",
    ):
        make_trainer(client, tmp_path).train()
    assert client.version == 7
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_a_second_run_on_the_same_server_is_refused_from_its_first_version_on(tmp_path):
    client = FakeClient(make_batches(2))
    client.set_policy_version(0, str(tmp_path / "first" / "step-0"))
    with pytest.raises(RuntimeError, match=r"version 0 of the run in .*first, .*replay policy set 0 --rollback"):
        make_trainer(client, tmp_path / "second").train()
    client.set_policy_version(0, "step-0", rollback=True)  # without a folder, as somebody's own trainer may announce it
    with pytest.raises(RuntimeError, match=r"version 0 of the run in step-0, this run at 0"):
        make_trainer(client, tmp_path / "second").train()
    client.set_policy_version(0, "", rollback=True)
    make_trainer(client, tmp_path / "second", max_steps=1).train()
    assert client.version == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups_per_step": 0}, "groups_per_step must be at least 1, not 0"),
        ({"keep_weights": 1}, "keep_weights must be at least 2"),
        ({"learning_rate": math.nan}, "learning_rate must be a finite number, not nan"),
        ({"max_steps": "5"}, "max_steps must be a whole number, not '5'"),
        ({"learning_rate": True}, "learning_rate must be a number, not True"),
        ({"zero_variance": "skip"}, "zero_variance must be 'replace', 'none' or 'dynamic', not 'skip'"),
        ({"report_to": ("mlflow",)}, "report_to.0 must be 'tensorboard' or 'wandb', not 'mlflow'"),
        ({"correction": 7}, "correction must be an instance of CorrectionConfig, not 7"),
        ({"max_grad_norm": 0.0}, "max_grad_norm must be greater than 0"),
        ({"learning_rate": math.inf}, "learning_rate must be a finite number, not inf"),
        ({"adam_beta2": 1.0}, "adam_beta2 must be less than 1, not 1.0"),
        ({"bf16": "yes"}, "bf16 must be true or false, not 'yes'"),
        ({"epsilon_high": -0.1}, "epsilon_high must be at least 0, not -0.1"),
        ({"replay_share": 0.95}, "replay_share must be at most 0.9, not 0.95"),
        ({"groups_per_step": 2, "replay_share": 0.8}, "groups_per_step=2 with replay_share=0.8 leaves no fresh group"),
        ({"sample_timeout": -1.0}, "sample_timeout must be at least 0, not -1.0"),
        ({"report_to": "wand"}, "report_to.0 must be 'tensorboard' or 'wandb', not 'wand'"),
        ({"report_to": 3}, "report_to must be a list, not 3"),
        ({"loss_type": "cispo"}, "needs epsilon_high"),
    ],
)
def test_a_bad_configuration_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        GRPOConfig(output_dir="unused", **options)


# ------------------------------------------------------------------------------------------------- what is trained on


def mixed_batches(count: int) -> list[list[Sample]]:
    """Two of three groups of each batch have no variance."""
    return make_batches(count, zero_variance=2)


def test_one_field_chooses_between_replacing_keeping_and_drawing_more(tmp_path):
    pool = [make_sample(make_group(rewards=[0.0, 1.0]), key=500 + i) for i in range(9)]
    trained = {}
    for rule in ("replace", "none", "dynamic"):
        trainer = make_trainer(
            FakeClient(mixed_batches(5), pool), tmp_path / rule, max_steps=1, groups_per_step=3, zero_variance=rule
        )
        trainer.train()
        (trained[rule],) = lines_of(tmp_path / rule)
    assert {rule: line["train/groups"] for rule, line in trained.items()} == {"replace": 3, "none": 3, "dynamic": 3}
    assert {rule: line["fresh/groups"] for rule, line in trained.items()} == {"replace": 3, "none": 3, "dynamic": 9}
    fractions = {rule: line["train/zero_variance_fraction"] for rule, line in trained.items()}
    assert fractions == {"replace": 0, "none": pytest.approx(2 / 3), "dynamic": 0}
    assert trained["replace"]["replay/groups_replaced"] == 2
    assert trained["dynamic"]["replay/groups_dropped"] == 6
    assert trained["replace"].keys() == trained["none"].keys() == trained["dynamic"].keys()


@pytest.mark.parametrize(
    ("rule", "admitted", "remedy"),
    [("replace", 2, "to 3$"), ("dynamic", 3, r"to 3 divided by the share .*; 30 is always enough")],
)
def test_a_server_that_admits_less_than_a_step_takes_is_refused(tmp_path, rule, admitted, remedy):
    client = FakeClient(mixed_batches(1))
    options: dict[str, Any] = {"max_steps": 1, "groups_per_step": 3, "zero_variance": rule}
    client.admitted = admitted
    with pytest.raises(ValueError, match=f"lets {admitted} fresh groups .* Raise fresh_groups_per_step there {remedy}"):
        make_trainer(client, tmp_path, **options).train()
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    client.admitted = admitted + 1
    make_trainer(client, tmp_path, **options).train()


@pytest.mark.parametrize(("share", "fresh"), [(0.25, 3), (0.5, 2), (0.9, 1), (0.0, 4)])
def test_the_server_must_admit_the_fresh_groups_of_a_step(tmp_path, share, fresh):
    config = GRPOConfig(output_dir=tmp_path, groups_per_step=4 if share < 0.9 else 10, replay_share=share)
    assert config.fresh_groups_per_step == fresh
    config.check_admission(fresh)
    with pytest.raises(
        ValueError, match=f"lets {fresh - 1} fresh groups? .* takes {fresh} or more.* there to {fresh}$"
    ):
        config.check_admission(fresh - 1)


def test_groups_of_the_pool_that_drifted_too_far_are_left_out(tmp_path):
    model, stored = make_model(), [make_group(rewards=[0.0, 1.0], completions=[[5, 6], [7]]) for _ in range(3)]
    drifts = [0.1, -0.6, 0.2]  # log(π/b) of every token
    for group, drift in zip(stored, drifts, strict=True):
        group.rollout_logprobs[:] = logprobs_of(model, [group]).numpy() - drift
    pool = [make_sample(group, key=500 + i) for i, group in enumerate(stored)]
    options = {"max_steps": 1, "groups_per_step": 5, "replay_share": 0.4}

    def line(name: str, **more: Any) -> dict[str, Any]:
        batches = [[make_sample(make_group(rewards=r), key=i) for i, r in enumerate([[0.0, 1.0], ALL_WRONG])]]
        make_trainer(FakeClient(batches, pool), tmp_path / name, model=make_model(), **options, **more).train()
        return lines_of(tmp_path / name)[0]

    every, near = line("every"), line("near", replay_max_drift=0.5)
    assert every["train/groups"] == 4
    assert every["replay/groups_drifted"] == 0
    assert every["replay/drift_max"] == pytest.approx(0.6, abs=1e-4)
    assert near["train/groups"] == 3
    assert near["replay/groups_drifted"] == 1
    assert near["replay/drift_mean"] == pytest.approx(0.15, abs=1e-4)
    assert near["replay/drift_max"] == pytest.approx(0.2, abs=1e-4)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_rewards_are_scaled_as_told(tmp_path, scale):
    rewards = [[1.0, 0.0], [3.0, 0.0, 0.0]]
    samples = [make_sample(make_group(rewards=each), key=i) for i, each in enumerate(rewards)]
    for sample in samples:
        sample.group.advantages = np.full(sample.group.group_size, 99, np.float32)  # not to be used
    trainer = make_trainer(FakeClient([samples]), tmp_path, max_steps=1, scale_rewards=scale)
    trained, backward = [], trainer.passes.backward
    trainer.passes.backward = lambda batch, old_BT: trained.append(batch) or backward(batch, old_BT)
    trainer.train()
    advantages = trained[0].advantages_B.tolist()
    centred = [0.5, -0.5, 2.0, -1.0, -1.0]
    # std with Bessel's correction: of 1, 0; of 3, 0, 0; of all five
    deviation = {"group": [0.5**0.5] * 2 + [3**0.5] * 3, "batch": [1.7**0.5] * 5, "none": [1.0] * 5}[scale]
    offset = 0 if scale == "none" else 1e-4
    assert advantages == pytest.approx([a / (s + offset) for a, s in zip(centred, deviation, strict=True)], rel=1e-5)


@pytest.mark.parametrize("rule", ["replace", "dynamic", "none"])
@pytest.mark.parametrize(("scale", "without"), [(None, 0.0), ("group", 1.0)], ids=["as they are", "computed anew"])
def test_groups_of_one_are_judged_by_the_advantages_that_are_trained_on(tmp_path, rule, scale, without):
    batch = [make_sample(make_group(rewards=[1.0], completions=[[5, 6]]), key=key) for key in range(3)]
    for sample in batch:
        sample.group.advantages = np.ones(1, np.float32)
        sample.payload = sample.group.encode()
    client = FakeClient([batch], pool=[make_sample(make_group(rewards=[1.0, 0.0]), key=9)])
    options: dict[str, Any] = {"zero_variance": rule, "scale_rewards": scale}
    make_trainer(client, tmp_path, max_steps=1, groups_per_step=3, **options).train()
    (line,) = lines_of(tmp_path)
    assert line["fresh/zero_variance_fraction"] == without
    assert line["replay/groups_zero_variance"] == 3 * without * (10 if rule == "dynamic" else 1)
    assert (line["train/grad_norm"] > 0) == (without == 0 or rule == "replace")


def test_priorities_follow_what_the_correction_trusts(tmp_path):
    group = make_group(rewards=[1.0, 0.0])
    group.rollout_logprobs[:] = logprobs_of(make_model(), [group]).numpy() + math.log(4.0)  # a ratio of 1/4
    sample = make_sample(group, key=5)
    client = FakeClient([[sample]], pool=[sample])
    make_trainer(client, tmp_path, max_steps=1, update_priorities=True).train()
    assert client.priorities[5] == pytest.approx(0.25 * group_priority(group.rewards, group.advantages), rel=1e-3)
    assert lines_of(tmp_path)[0]["replay/priorities_updated"] == 1


def test_truncated_completions_may_be_left_out(tmp_path):
    group = make_group(rewards=[1.0, 0.0], completions=[[5, 6, 7], [8]], finish_reasons=("length", "stop"))
    make_trainer(FakeClient([[make_sample(group)]]), tmp_path, max_steps=1, mask_truncated_completions=True).train()
    (metrics,) = lines_of(tmp_path)
    assert metrics["train/tokens"] == 1
    assert metrics["fresh/truncated_fraction"] == 0.5


@pytest.mark.parametrize("loss_type", ["dapo", "gspo"])
def test_autocast_trains_almost_what_float32_trains(tmp_path, loss_type):
    changes = []
    for bf16 in (False, True):
        options = {"max_steps": 1, "max_grad_norm": math.inf, "learning_rate": 1.0, "loss_type": loss_type}
        trainer = make_trainer(FakeClient(make_batches(1)), tmp_path / str(bf16), bf16=bf16, **options)
        trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=1.0)
        trainer.train()
        pairs = zip(trainer.model.parameters(), make_model().parameters(), strict=True)
        changes.append(torch.cat([(p - q).detach().flatten() for p, q in pairs]))
        assert all(p.dtype == torch.float32 for p in trainer.model.parameters())
    assert torch.nn.functional.cosine_similarity(changes[0], changes[1], dim=0) > 0.99
    assert not torch.equal(changes[0], changes[1])


def test_the_learning_rate_warms_up_and_decays_as_a_function_of_the_step(tmp_path):
    def rates(kind: str) -> list[float]:
        config = GRPOConfig(
            output_dir="unused",
            learning_rate=1.0,
            lr_scheduler_type=kind,
            warmup_steps=2,
            max_steps=6,  # type: ignore[arg-type]
        )
        return [config.learning_rate_at(step) for step in range(1, 7)]

    assert rates("constant") == [0.5, 1, 1, 1, 1, 1]
    assert rates("linear") == [0.5, 1, 1, 0.75, 0.5, 0.25]
    assert rates("cosine") == pytest.approx([0.5, 1, 1, (1 + 0.5**0.5) / 2, 0.5, (1 - 0.5**0.5) / 2])
    options = {"max_steps": 3, "lr_scheduler_type": "linear", "learning_rate": 1e-3}
    make_trainer(FakeClient(make_batches(3)), tmp_path, **options).train()
    assert [line["train/learning_rate"] for line in lines_of(tmp_path)] == pytest.approx([1e-3, 2e-3 / 3, 1e-3 / 3])


# ----------------------------------------------------------------------------------------------------------- reports


def test_an_evaluation_is_part_of_the_metrics_of_its_steps(tmp_path):
    seen = []

    def evaluate(trainer: GRPOTrainer) -> dict[str, float]:
        seen.append(trainer.model.lm_head.weight.detach().clone())
        return {"reward_mean": 0.5}

    make_trainer(FakeClient(make_batches(4)), tmp_path, max_steps=4, eval_every=2, evaluate=evaluate).train()
    assert [line.get("eval/reward_mean") for line in lines_of(tmp_path)] == [None, 0.5, None, 0.5]
    assert not torch.equal(seen[0], seen[1])


def test_held_out_groups_of_a_table_evaluate_the_policy(tmp_path):
    held_out = [make_sample(make_group(rewards=[1.0, 0.0, 1.0]), key=9, staleness=2)]
    evaluation = TableEvaluation(FakeClient(pool=held_out), table="eval")  # type: ignore[arg-type]
    make_trainer(FakeClient(make_batches(1)), tmp_path, max_steps=1, eval_every=1, evaluate=evaluation).train()
    (metrics,) = lines_of(tmp_path)
    assert metrics["eval/reward_mean"] == pytest.approx(2 / 3)
    assert metrics["eval/staleness_mean"] == 2
    nothing = TableEvaluation(FakeClient())  # type: ignore[arg-type]
    make_trainer(FakeClient(make_batches(1)), tmp_path / "n", max_steps=1, eval_every=1, evaluate=nothing).train()
    assert lines_of(tmp_path / "n")[0]["eval/groups"] == 0
    assert lines_of(tmp_path / "n")[0]["eval/reward_mean"] is None


def test_completions_are_written_and_shown_with_their_source(tmp_path, capfd):
    stored = make_sample(make_group(rewards=[0.0, 1.0], prompt=[9, 8]), key=2, age=7.0, staleness=3)
    fresh = [
        make_sample(make_group(rewards=ALL_WRONG), key=1),
        make_sample(make_group(prompt=[4], rewards=[0.0, 1.0]), key=3),
    ]
    options = {"log_completions": True, "num_completions_to_print": 2, "progress": True}
    make_trainer(FakeClient([fresh], pool=[stored]), tmp_path, max_steps=1, **options).train()
    first, second = (json.loads(line) for line in (tmp_path / "completions.jsonl").read_text().splitlines())
    assert first["prompt"] == "9 8"
    assert first["source"] == "replayed"
    assert first["age"] == 7.0
    assert first["staleness"] == 3
    assert second["source"] == "fresh"
    assert second["prompt"] == "4"
    assert second["reward"] == 1.0
    shown = capfd.readouterr().err
    assert "replayed" in shown
    assert "step 1: fresh reward 0.200, replaced 1, loss" in shown


def test_tensorboard_gets_every_number(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    make_trainer(FakeClient(make_batches(2)), tmp_path, max_steps=2, report_to=("tensorboard",)).train()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    losses = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert losses == [(line["step"], pytest.approx(line["train/loss"], rel=1e-5)) for line in lines_of(tmp_path)]
    finite = {name for name, value in lines_of(tmp_path)[0].items() if value is not None} - {"step"}
    assert finite <= set(events.Tags()["scalars"])


def test_a_reporter_that_is_not_installed_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="report_to names wandb, which is not installed: pip install wandb"):
        make_trainer(FakeClient(make_batches(1)), tmp_path, report_to=("wandb",))


def test_every_metric_is_declared_and_every_declared_one_is_written(tmp_path):
    options = {"eval_every": 1, "beta": 0.1, "update_priorities": True}
    make_trainer(FakeClient(make_batches(2)), tmp_path, max_steps=2, evaluate=lambda _: {}, **options).train()
    written = lines_of(tmp_path)[1].keys()
    of_trainer = {
        name
        for section, metrics in SECTIONS.items()
        if section != "generator"
        for metric in metrics
        for name in metric.names
    }
    assert written - of_trainer == set()
    assert of_trainer - written == {"train/teacher_kl"}, "this run has no teacher"


def test_a_configuration_file_names_presets_and_nests_tables(tmp_path):
    assert GRPOConfig(output_dir=tmp_path, correction="icepop").correction == PRESETS["icepop"]()
    rejection = [{"estimator": "k1", "high": 2.0}, {"estimator": "k3", "aggregate": "mean", "high": 0.1}]
    config = GRPOConfig(output_dir=tmp_path, correction={"level": "sequence", "rejection": rejection})
    assert config.correction.rejections == (Rejection("k1", high=2.0), Rejection("k3", "mean", high=0.1))
    with pytest.raises(ValueError, match=r"there is no preset 'icepops' of correction; there are trl_token_truncate"):
        GRPOConfig(output_dir=tmp_path, correction="icepops")
    with pytest.raises(ValueError, match=r"correction: CorrectionConfig: there is no 'levl'; did you mean 'level'\?"):
        GRPOConfig(output_dir=tmp_path, correction={"levl": "sequence"})
    for kind, misspelt, right in (
        (GRPOConfig, "learning_rte", "learning_rate"),
        (CorrectionConfig, "levl", "level"),
        (LossConfig, "epsilonn", "epsilon"),
    ):
        with pytest.raises(ValueError, match=f"{kind.__name__}: there is no '{misspelt}'; did you mean '{right}'"):
            kind(**{misspelt: 1})


# ------------------------------------------------------------------------------------------------------ publication


def publish(model: Any, directory: Path, version: int, keep: int = 2, **options: Any) -> Path:
    return publish_weights(model, None, directory, version, keep, {"token_ids": [], "logprobs": []}, **options)


def test_the_probe_is_what_the_saved_weights_say(tmp_path):
    make_trainer(FakeClient(make_batches(1)), tmp_path, model=make_model(seed=3), max_steps=1).train()
    assert probe_difference(AutoModelForCausalLM.from_pretrained(tmp_path / "step-1"), tmp_path / "step-1") < 1e-5


def test_the_probe_asks_all_versions_the_same_and_no_special_token():
    class Tokenizer:
        all_special_ids = (0, 3, 9)

        def __len__(self) -> int:
            return 12

    first, second = probe_tokens(make_model(seed=1), Tokenizer()), probe_tokens(make_model(seed=2), Tokenizer())
    assert first == second
    assert set(first) <= set(range(12)) - {0, 3, 9}


def test_only_files_of_ours_are_removed(tmp_path):
    model = make_model()
    (tmp_path / "step-1000").mkdir()  # not ours: no manifest
    (tmp_path / "step-1000/precious").write_text("x")
    for version in range(3):
        folder = publish(model, tmp_path, version)
        (folder / "notes.txt").write_text(f"about {version}")
    publish(model, tmp_path, 3)
    assert [path.name for path in published(tmp_path)] == ["step-2", "step-3"]
    assert [path.name for path in sorted((tmp_path / "step-0").iterdir())] == ["notes.txt"]
    assert (tmp_path / "step-1000/precious").exists()


def test_an_existing_version_is_not_written_over(tmp_path):
    publish(make_model(), tmp_path, 4)
    with pytest.raises(FileExistsError, match="step-4 exists"):
        publish(make_model(), tmp_path, 4)

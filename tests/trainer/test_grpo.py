"""The whole step on a tiny model: it learns, can be cut into parts, killed and resumed, and stops before it breaks."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_factories import FakeClient, OnlineClient, make_group, make_model, make_sample
from transformers import AutoModelForCausalLM

from replay_client import RolloutGroup, Sample
from replay_trainer import GRPOConfig, GRPOTrainer
from replay_trainer.batching import chosen_logprobs, to_batch
from replay_trainer.correction import CorrectionConfig, Rejection
from replay_trainer.weights import probe, publish_weights, published

ALL_WRONG = [0.0] * 3


def make_batches(count: int, *, seed: int = 0) -> list[list[Sample]]:
    """Batches of three groups of unequal G and lengths, the same for the same seed."""
    random = torch.Generator().manual_seed(seed)

    def tokens(length: int) -> list[int]:
        return torch.randint(3, 15, (length,), generator=random).tolist()

    batches = []
    for version in range(count):
        groups = [
            make_group(
                rewards=[1.0, 0.0, 0.0, 1.0][:group_size],
                prompt=tokens(prompt),
                completions=[tokens(1 + (j * 2) % 5) for j in range(group_size)],
                logprobs=-2.5,
            )
            for group_size, prompt in ((2, 4), (4, 1), (3, 2))
        ]
        batches.append([make_sample(group, key=10 * version + i) for i, group in enumerate(groups)])
    return batches


def make_trainer(
    client: Any, output_dir: Path, *, model: Any = None, on_step: Any = None, **options: Any
) -> GRPOTrainer:
    config = GRPOConfig(output_dir=output_dir, **({"max_steps": 3, "learning_rate": 1e-3} | options))
    return GRPOTrainer(model or make_model(), client, config, on_step=on_step)


def lines(output_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]


def assert_same_weights(a: Any, b: Any, **tolerance: float) -> None:
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, **tolerance)


def logprobs_of(model: Any, groups: Sequence[RolloutGroup]) -> torch.Tensor:
    """(T,) current log-probabilities of all completion tokens."""
    batch = to_batch(groups)
    with torch.no_grad():
        return chosen_logprobs(model, batch)[batch.mask_BT]


def test_training_raises_the_reward(tmp_path: Path) -> None:
    model = make_model()
    client = OnlineClient(model, prompts=[[4, 5], [6], [8, 3, 3], [9, 9]], group_size=8)
    trainer = make_trainer(client, tmp_path, model=model, max_steps=25, groups_per_step=8, learning_rate=1e-2)
    trainer.train()
    rewards = [line["fresh/reward_mean"] for line in lines(tmp_path)]
    assert sum(rewards[:3]) / 3 < 0.25
    assert sum(rewards[-3:]) / 3 > 0.75
    assert sum(line["replay/groups_replaced"] for line in lines(tmp_path)) > 0
    # Rewards and log-probabilities of fresh groups are on policy; what was replaced is not.
    assert lines(tmp_path)[0]["correction/ratio_mean"] == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {"loss_type": "dapo"},
        {"loss_type": "grpo", "num_iterations": 2},
        {"loss_type": "gspo", "beta": 0.1, "num_iterations": 2},
        {"loss_type": "cispo", "epsilon_high": 3.0},
        {"loss_type": "dr_grpo", "max_completion_length": 8},
        {"correction": CorrectionConfig(level="sequence", batch_normalize=True)},
    ],
    ids=["dapo", "grpo", "gspo with kl", "cispo", "dr_grpo", "batch_normalize"],
)
def test_micro_batches_make_no_difference(tmp_path: Path, options: dict[str, Any]) -> None:
    trained = []
    for size in (1, 4, 100):
        trainer = make_trainer(
            FakeClient(make_batches(2)), tmp_path / str(size), micro_batch_size=size, max_steps=2, **options
        )
        # With plain gradient descent the weights show the gradient; AdamW's would show little but its sign.
        trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
        trainer.train()
        trained.append((trainer.model, lines(tmp_path / str(size))[-1]))
    for model, metrics in trained[1:]:
        assert_same_weights(model, trained[0][0], atol=1e-6, rtol=1e-4)
        for name, value in metrics.items():
            if value is None:
                assert trained[0][1][name] is None
            elif not name.startswith("time/") and name != "train/tokens_per_second":
                assert value == pytest.approx(trained[0][1][name], rel=1e-3, abs=1e-5), name
    assert any(
        not torch.equal(p, q) for p, q in zip(trained[0][0].parameters(), make_model().parameters(), strict=True)
    )


def test_the_old_policy_is_the_one_before_the_first_update_of_the_step(tmp_path: Path) -> None:
    model = make_model()
    group = make_group(rewards=[1.0, 0.0], completions=[[5, 6], [7]])
    group.rollout_logprobs[:] = logprobs_of(model, [group]).numpy() - math.log(1.5)
    client = FakeClient([[make_sample(group)]])
    make_trainer(client, tmp_path, model=model, max_steps=1, num_iterations=3, learning_rate=1e-2).train()
    (metrics,) = lines(tmp_path)
    assert metrics["correction/ratio_min"] == pytest.approx(1.5, rel=1e-4)
    assert metrics["correction/ratio_max"] == pytest.approx(1.5, rel=1e-4)
    assert metrics["train/approx_kl"] > 1e-4  # of the last iteration: two updates away from the old policy


def test_a_replaced_group_is_corrected_by_its_own_samplers_logprobs(tmp_path: Path) -> None:
    model = make_model()
    stored = make_group(rewards=[0.0, 1.0, 1.0], prompt=[9, 8, 7], completions=[[5], [6, 7], [8, 9, 10, 11]])
    stored.rollout_logprobs[:] = logprobs_of(model, [stored]).numpy() - math.log(4.0)
    fresh = make_group(rewards=ALL_WRONG)
    client = FakeClient([[make_sample(fresh, key=1)]], pool=[make_sample(stored, key=2, age=7.0, staleness=3)])
    make_trainer(client, tmp_path, model=model, max_steps=1).train()
    (metrics,) = lines(tmp_path)
    assert metrics["train/tokens"] == 7
    assert metrics["correction/ratio_min"] == pytest.approx(4.0, rel=1e-4)
    assert metrics["correction/clipped_fraction"] == 1.0
    assert (metrics["replay/age_mean"], metrics["replay/staleness_mean"]) == (7.0, 3.0)
    assert (metrics["fresh/reward_mean"], metrics["fresh/zero_variance_fraction"]) == (0.0, 1.0)
    assert metrics["train/reward_mean"] == pytest.approx(2 / 3)
    assert metrics["train/zero_variance_fraction"] == 0.0


def test_the_update_is_weighted_and_rejected_as_configured(tmp_path: Path) -> None:
    group = make_group(rewards=[1.0, 0.0])
    group.rollout_logprobs[:] = logprobs_of(make_model(), [group]).numpy() - math.log(4.0)

    def change(name: str, **correction: Any) -> torch.Tensor:
        client = FakeClient([[make_sample(group)]])
        config = CorrectionConfig(**correction)
        trainer = make_trainer(client, tmp_path / name, max_steps=1, max_grad_norm=math.inf, correction=config)
        trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
        trainer.train()
        return trainer.model.lm_head.weight.detach() - make_model().lm_head.weight.detach()

    unweighted = change("unweighted", clip_min=1.0, clip_max=1.0)
    assert unweighted.abs().max() > 1e-3
    torch.testing.assert_close(change("truncated", clip_max=2.0), 2 * unweighted, atol=1e-6, rtol=1e-3)
    assert change("rejected", rejection=Rejection("k1", "token", high=3.0)).abs().max() == 0


@pytest.mark.parametrize("on_empty", ["keep", "drop"])
def test_a_step_without_any_variance_is_done_and_changes_nothing(tmp_path: Path, on_empty: str) -> None:
    client = FakeClient([[make_sample(make_group(rewards=ALL_WRONG))]])
    trainer = make_trainer(client, tmp_path, max_steps=1, on_empty=on_empty)
    trainer.train()
    assert_same_weights(trainer.model, make_model(), atol=0, rtol=0)
    assert client.version == 1
    (metrics,) = lines(tmp_path)
    assert metrics["replay/groups_missing"] == 1
    assert metrics["train/rows"] == (3 if on_empty == "keep" else 0)
    assert metrics["train/loss"] == metrics["train/grad_norm"] == 0.0
    assert metrics["replay/age_mean"] is None  # nothing to take the mean of


def test_saving_weights_draws_no_progress_bar(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make_trainer(FakeClient(make_batches(1)), tmp_path, max_steps=1).train()
    make_trainer(FakeClient(make_batches(1)), tmp_path, max_steps=1, resume=True).train()
    assert capfd.readouterr() == ("", "")


def test_the_reference_of_the_kl_is_the_model_as_it_was_handed_over(tmp_path: Path) -> None:
    make_trainer(FakeClient(make_batches(2)), tmp_path, max_steps=2, beta=0.5, learning_rate=1e-2).train()
    first, second = lines(tmp_path)
    assert first["train/kl"] == pytest.approx(0.0, abs=1e-6)
    assert second["train/kl"] > 1e-4


def test_every_version_is_published_before_the_next_step(tmp_path: Path) -> None:
    client = FakeClient(make_batches(4))
    seen = []

    def on_step(metrics: dict[str, float]) -> None:
        # Called before the version of this step is published: the server is one behind, its weights are there.
        seen.append((metrics["step"], client.version, Path(client.weights).name))

    trainer = make_trainer(client, tmp_path, max_steps=4, keep_weights=2, on_step=on_step)
    trainer.train()
    assert seen == [(1, 0, "step-0"), (2, 1, "step-1"), (3, 2, "step-2"), (4, 3, "step-3")]
    assert [folder.name for folder in published(tmp_path)] == ["step-3", "step-4"]
    assert client.version == 4
    saved = AutoModelForCausalLM.from_pretrained(client.weights)
    assert_same_weights(saved, trainer.model, atol=0, rtol=0)


def test_publishing_seldom_still_publishes_the_last_version(tmp_path: Path) -> None:
    client = FakeClient(make_batches(1) * 6)
    make_trainer(client, tmp_path, max_steps=5, publish_every=3).train()
    assert [folder.name for folder in published(tmp_path)] == ["step-0", "step-3", "step-5"]


class Killed(BaseException):
    pass


@pytest.mark.parametrize("publish_every", [1, 2])
def test_a_killed_run_resumes_without_repeating_or_skipping_a_step(tmp_path: Path, publish_every: int) -> None:
    options = {"max_steps": 5, "publish_every": publish_every, "beta": 0.1}
    batches = make_batches(6)
    whole = make_trainer(FakeClient(batches), tmp_path / "whole", **options)
    whole.train()

    def die_in_step_4(metrics: dict[str, float]) -> None:
        if metrics["step"] == 4:
            raise Killed

    client = FakeClient(batches)
    with pytest.raises(Killed):
        make_trainer(client, tmp_path / "killed", on_step=die_in_step_4, **options).train()
    # As a process killed while it writes leaves them: half a line, and half a folder.
    with (tmp_path / "killed/metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "tr')
    (tmp_path / "killed/step-4.tmp").mkdir(exist_ok=True)
    (tmp_path / "killed/step-4.tmp/model.safetensors").write_bytes(b"half")
    if publish_every == 1:
        client.version = 2  # the server was restarted too, from something older

    resumed = make_trainer(client, tmp_path / "killed", resume=True, **options)
    resumed.train()
    assert [line["step"] for line in lines(tmp_path / "killed")] == [1, 2, 3, 4, 5]
    losses = [[line["train/loss"] for line in lines(tmp_path / run)] for run in ("whole", "killed")]
    assert losses[0] == losses[1]
    assert_same_weights(resumed.model, whole.model, atol=0, rtol=0)
    assert client.version == 5


def test_resuming_a_finished_run_announces_its_weights_again(tmp_path: Path) -> None:
    make_trainer(FakeClient(make_batches(2)), tmp_path, max_steps=2).train()
    restarted = FakeClient(make_batches(2))
    make_trainer(restarted, tmp_path, max_steps=2, resume=True).train()
    assert (restarted.version, Path(restarted.weights).name) == (2, "step-2")
    assert len(lines(tmp_path)) == 2


def test_a_fresh_start_refuses_the_folder_of_another_run(tmp_path: Path) -> None:
    make_trainer(FakeClient(make_batches(2)), tmp_path, max_steps=1).train()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(FileExistsError, match=r"holds step-1 of an earlier run: set resume=True"):
        make_trainer(FakeClient(make_batches(2)), tmp_path).train()
    assert sorted(tmp_path.rglob("*")) == before


def test_a_fresh_start_refuses_a_server_that_is_ahead(tmp_path: Path) -> None:
    client = FakeClient(make_batches(2), version=7)
    with pytest.raises(RuntimeError, match=r"server is at policy version 7, this run at 0: set resume=True"):
        make_trainer(client, tmp_path).train()
    assert client.version == 7
    assert not list(tmp_path.iterdir())


def test_a_loss_that_is_not_finite_stops_before_the_weights_are_touched(tmp_path: Path) -> None:
    batches = make_batches(2)
    broken = make_group(rewards=[1.0, 0.0])
    broken.advantages[0] = math.nan
    batches[1] = [make_sample(broken)]
    trainer = make_trainer(FakeClient(batches), tmp_path)
    with pytest.raises(FloatingPointError, match=r"step 2: loss nan.*published\s+weights are intact"):
        trainer.train()
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "step-1")
    assert_same_weights(saved, trainer.model, atol=0, rtol=0)
    assert len(lines(tmp_path)) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups_per_step": 0}, "groups_per_step must be at least 1, not 0"),
        ({"keep_weights": 1}, "keep_weights must be at least 2"),
        ({"learning_rate": math.nan}, "learning_rate must be at least 0, not nan"),
        ({"max_grad_norm": 0.0}, "max_grad_norm must be above 0"),
        ({"loss_type": "ppo"}, "loss_type must be one of"),
        ({"loss_type": "cispo"}, "needs epsilon_high"),
        ({"loss_type": "dr_grpo"}, "needs max_completion_length"),
    ],
)
def test_a_bad_configuration_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GRPOConfig(output_dir="unused", **options)


# ------------------------------------------------------------------------------------------------------ publication


def publish(model: Any, directory: Path, version: int, keep: int = 2) -> Path:
    return publish_weights(model, None, directory, version, keep, torch.optim.SGD(model.parameters(), lr=0.1))


def test_the_probe_is_what_the_saved_weights_say(tmp_path: Path) -> None:
    folder = publish(make_model(seed=3), tmp_path, 0)
    content = json.loads((folder / "probe.json").read_text())
    ids = torch.tensor([content["token_ids"]])
    assert len(content["logprobs"]) == ids.shape[1] - 1
    reloaded = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        logprobs_SV = reloaded(ids).logits[0].log_softmax(-1)
    expected = [logprobs_SV[i, token].item() for i, token in enumerate(content["token_ids"][1:])]
    assert content["logprobs"] == pytest.approx(expected, abs=1e-5)


def test_the_probe_asks_all_versions_the_same_and_no_special_token() -> None:
    class Tokenizer:
        all_special_ids = (0, 3, 9)

        def __len__(self) -> int:
            return 12

    first, second = probe(make_model(seed=1), Tokenizer()), probe(make_model(seed=2), Tokenizer())
    assert first["token_ids"] == second["token_ids"]
    assert set(first["token_ids"]) <= set(range(12)) - {0, 3, 9}
    assert first["logprobs"] != second["logprobs"]


def test_only_files_of_ours_are_removed(tmp_path: Path) -> None:
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


def test_an_existing_version_is_not_written_over(tmp_path: Path) -> None:
    publish(make_model(), tmp_path, 4)
    with pytest.raises(FileExistsError, match="step-4 exists"):
        publish(make_model(), tmp_path, 4)

"""ReplayGRPOTrainer through TRL's own `train()`."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback

from replay_client import ReplayClient
from replay_client.errors import DeadlineExceededError, TableNotFoundError
from replay_client.scoring import is_zero_variance
from replay_client.testing import make_group

pytest.importorskip("trl", reason="pip install '.[trl]'")

import trl

from examples.demo.task import make_tokenizer
from replay_adapters.trl import (
    GRPOWithReplayBufferConfig,
    GRPOWithReplayBufferTrainer,
    ReplayGRPOTrainer,
)
from tests.adapters.trl_factories import (
    GROUP_SIZE,
    RecordingTrainer,
    logprobs_of,
    make_dataset,
    make_trainer,
    metrics_of,
    ratios_of,
    rows_of,
    short_is_good,
    stored_row,
)
from tests.docs.blocks import blocks
from tests.kit.models import make_model

ROOT = Path(__file__).parents[2]


def stored_group(trainer, sample):
    """The group as the server holds it now."""
    return trainer.pool.client.get([sample.info.key])[0].group


def replaced_rows(trainer):
    """(output, model, row, stored group, index of the completion) of every replaced row of the run."""
    for step, output, model in trainer.steps:
        for g, sample in step.replaced.items():
            group = stored_group(trainer, sample)
            for k in range(GROUP_SIZE):
                yield output, model, g * GROUP_SIZE + k, group, k


def test_a_group_without_variance_becomes_what_the_server_holds_once_the_pool_has_others(tmp_path):
    # Prompts of three lengths in every step but few, so that replaced groups meet others on which TRL puts padding.
    trainer = make_trainer(
        tmp_path, dataset=Dataset.from_list([{"prompt": "1+2="[-n:]} for n in (2, 3, 4)] * 16), max_steps=10
    )
    trainer.train()
    rows, padded, lengths = 0, False, set()
    for output, model, row, group, k in replaced_rows(trainer):
        padded = padded or not bool(output["prompt_mask"].all())
        prompt, completion, _ = stored_row(group, k)
        assert rows_of(output, row) == (prompt, completion)
        expected = torch.zeros(output["completion_ids"].size(1))
        expected[: len(completion)] = float(group.advantages[k]) * ratios_of(model, group, k).clamp(max=2.0)
        torch.testing.assert_close(output["advantages"][row], expected, atol=2e-4, rtol=2e-4)
        rows, lengths = rows + 1, lengths | {len(completion)}
    assert rows >= 2 * GROUP_SIZE
    assert padded  # some prompts are shorter than the longest, which pads them on the left
    assert len(lengths) > 1
    missing = metrics_of(trainer, "replay/groups_missing")
    assert metrics_of(trainer, "frac_reward_zero_std") == pytest.approx([left / 4 for left in missing])
    assert missing[-1] == 0
    assert all(0 < ratio <= 2 for ratio in metrics_of(trainer, "replay/ratio"))
    assert all(staleness >= 1 for staleness in metrics_of(trainer, "replay/staleness"))


def test_the_pool_gets_the_informative_groups_with_the_log_probabilities_of_their_sampler(tmp_path, server):
    trainer = make_trainer(tmp_path, replay=server.address, temperature=0.7, replay_max_staleness=1, max_steps=8)
    trainer.train()
    client = trainer.pool.client
    assert [each.ended for each in client.server_info().clients] == [True]  # so nobody misses the trainer
    staleness = [sample.info.staleness for step, _, _ in trainer.steps for sample in step.replaced.values()]
    assert {*staleness} == {1}
    keys = [item.key for item in client.list_items("replay", limit=100, order_by="age", descending=True).items]
    stored = [item.group for item in client.get(keys)]
    made = []
    for step, _, model in trainer.steps:
        for first in range(0, len(step.fresh.prompt_ids), GROUP_SIZE):
            rewards = step.rewards_BF[first : first + GROUP_SIZE, 0].tolist()
            if not is_zero_variance(rewards):
                made.append((model, step, first, rewards))
    assert len(stored) == len(made) > 0
    for group, (model, step, first, rewards) in zip(stored, made, strict=True):
        assert group.rewards.tolist() == rewards
        assert group.policy_version == step.version
        assert group.sampling["temperature"] == 0.7
        for k, completion in enumerate(group.completions()):
            assert completion.tolist() == step.fresh.completion_ids[first + k]
            with torch.no_grad():
                expected = logprobs_of(model, group.prompt_ids.tolist(), completion.tolist(), temperature=0.7)
            torch.testing.assert_close(stored_row(group, k)[2], expected, atol=1e-4, rtol=1e-4)


class Gradients(TrainerCallback):
    """Keeps the gradient of each step."""

    def __init__(self):
        self.steps = []

    def on_pre_optimizer_step(self, args, state, control, model, **_):
        self.steps.append({name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None})


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_loss_and_gradient_of_a_step_with_replaced_rows_equal_those_of_a_loop_by_hand(tmp_path, loss_type):
    gradients = Gradients()
    trainer = make_trainer(tmp_path, loss_type=loss_type, max_grad_norm=0.0, callbacks=[gradients])
    trainer.train()
    index = next(i for i, (step, _, _) in enumerate(trainer.steps) if step.replaced)
    step, _, model = trainer.steps[index]
    model.zero_grad()
    groups = {g: stored_group(trainer, sample) for g, sample in step.replaced.items()}
    losses, counts = [], []
    for row in range(len(step.fresh.prompt_ids)):
        g, k = divmod(row, GROUP_SIZE)
        if g in groups:
            prompt, completion = groups[g].prompt_ids.tolist(), groups[g].completions()[k].tolist()
            rewards = torch.tensor(groups[g].rewards)
        else:
            prompt, completion = step.fresh.prompt_ids[row], step.fresh.completion_ids[row]
            rewards = step.rewards_BF[g * GROUP_SIZE : (g + 1) * GROUP_SIZE, 0]
        advantage = (rewards[k] - rewards.mean()) / (rewards.std() + 1e-4)
        logprobs = logprobs_of(model, prompt, completion)
        weights = torch.ones(len(completion))
        if g in groups:
            weights = ratios_of(model, groups[g], k).clamp(max=2.0)
        losses.append((-advantage * weights * (logprobs - logprobs.detach()).exp()).sum())
        counts.append(len(completion))
    if loss_type == "grpo":
        loss = sum(each / count for each, count in zip(losses, counts, strict=True)) / len(losses)
    else:
        loss = sum(losses) / (sum(counts) if loss_type == "dapo" else len(losses) * trainer.max_completion_length)
    loss.backward()
    assert metrics_of(trainer, "loss")[index] == pytest.approx(float(loss.detach()), abs=1e-4)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients.steps[index][name], parameter.grad, atol=2e-5, rtol=2e-3, msg=name)


@pytest.mark.parametrize(
    "options",
    [
        {"num_iterations": 2},
        pytest.param(
            {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "steps_per_generation": 4},
            marks=pytest.mark.long,
        ),
        {"beta": 0.1},
        pytest.param({"off_policy_mask_threshold": 0.05}, marks=pytest.mark.long),
        pytest.param({"mask_truncated_completions": True}, marks=pytest.mark.long),
        pytest.param({"loss_type": "cispo"}, marks=pytest.mark.long),
        pytest.param({"loss_type": "vespo"}, marks=pytest.mark.long),
        pytest.param({"importance_sampling_level": "sequence"}, marks=pytest.mark.long),
        pytest.param({"scale_rewards": "batch"}, marks=pytest.mark.long),
        pytest.param({"multi_objective_aggregation": "normalize_then_sum"}, marks=pytest.mark.long),
        pytest.param({"top_entropy_quantile": 0.5}, marks=pytest.mark.long),
        {"dataloader_num_workers": 1},
    ],
    ids=str,
)
def test_trls_other_options_work_with_replaced_rows(tmp_path, options):
    trainer = make_trainer(tmp_path, max_steps=8, **options)
    trainer.train()
    assert sum(metrics_of(trainer, "replay/groups_replaced")) > 0
    assert all(math.isfinite(loss) for loss in metrics_of(trainer, "loss"))
    assert all(torch.isfinite(parameter).all() for parameter in trainer.model.parameters())
    for output, model, row, group, k in replaced_rows(trainer):
        prompt, completion = rows_of(output, row)
        if not completion:  # TRL masks it, because it was truncated
            continue
        ratio = ratios_of(model, group, k).clamp(max=2.0)
        weighted = output["advantages"][row][: len(completion)]
        # Whatever TRL makes the advantage, each token's is multiplied by its own ratio.
        torch.testing.assert_close(weighted * ratio[0], weighted[0] * ratio, atol=1e-3, rtol=1e-3)
        if "old_per_token_logps" in output:
            with torch.no_grad():
                expected = logprobs_of(model, prompt, completion)
            torch.testing.assert_close(
                output["old_per_token_logps"][row][: len(completion)], expected, atol=1e-4, rtol=1e-3
            )


class SamplingTrainer(RecordingTrainer):
    """Runs TRL's code for vLLM; only the engine is the model itself, with log-probabilities that are off by 0.05."""

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations, **_):
        self.use_vllm = False
        completion_ids, _ = super()._generate_single_turn(prompt_ids, images, multimodal_fields, num_generations)
        self.use_vllm = True
        logprobs = []
        with torch.no_grad():
            for prompt, completion in zip(prompt_ids, completion_ids, strict=True):
                logprobs.append((logprobs_of(self.model, prompt, completion) - 0.05).tolist())
                logprobs[-1][0] = None  # what TRL makes of a NaN of vLLM's
        return completion_ids, logprobs


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_with_vllm_trl_corrects_replaced_rows_by_their_stored_log_probabilities(tmp_path, server, mode):
    trainer = make_trainer(
        tmp_path,
        trainer_class=SamplingTrainer,
        replay=server.address,  # with other draws, perhaps no ratio would be above the bound
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_max=1.1,
    )
    trainer.use_vllm = True
    trainer.train()
    rows = outside = 0
    for output, model, row, group, k in replaced_rows(trainer):
        prompt, completion, stored = stored_row(group, k)
        assert rows_of(output, row) == (prompt, completion)
        assert math.isnan(stored[0])
        ratio = ratios_of(model, group, k)
        ratio = ratio.prod(0, keepdim=True) if mode.startswith("sequence") else ratio
        expected = ratio.clamp(max=1.1) if mode.endswith("truncate") else ratio.where(ratio <= 1.1, 0.0)
        found = output["importance_sampling_ratio"][row][: len(ratio)]
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-3)
        assert output["advantages"].dim() == 1  # TRL multiplies by its own ratio, and we do not
        rows, outside = rows + 1, outside + int((ratio > 1.1).sum())
    assert rows >= GROUP_SIZE
    assert outside > 0


def test_several_reward_functions_come_back_as_they_were(tmp_path):
    def longer(completions, **_):
        return [None if len(text) == 3 else float(len(text)) / 4 for text in completions]

    trainer = make_trainer(tmp_path, reward=[short_is_good, longer], reward_weights=[1.0, 0.5], max_steps=6)
    trainer.train()
    for output, _, row, group, k in replaced_rows(trainer):
        rewards_GF = torch.tensor(group.extras["rewards_per_func"])
        rewards = (rewards_GF * torch.tensor([1.0, 0.5])).nansum(1)
        torch.testing.assert_close(rewards, torch.tensor(group.rewards))
        assert float(group.advantages[k]) == pytest.approx(
            float((rewards[k] - rewards.mean()) / (rewards.std() + 1e-4)), abs=1e-5
        )
        assert bool((output["advantages"][row] >= 0).all()) == bool(group.advantages[k] >= 0)


def test_groups_that_somebody_else_wrote_are_used_with_their_own_rewards_and_masks(tmp_path, server):
    with ReplayClient(server.address) as client:
        for seed in range(8):
            mask = [True, True, True, False, True, True, True, True, False, True]
            group = make_group(
                lengths=(3, 2, 4, 1), rewards=(0.0, 2.0, 0.0, 1.0), seed=seed, prompt=(5, 6, 7), loss_mask=mask
            )
            client.insert(group, {"replay": 1.0})
        client.insert(make_group(lengths=(2, 2), rewards=(0.0, 1.0)), {"replay": 1.0})  # another size: never used
    trainer = make_trainer(tmp_path, replay=server.address, reward=lambda completions, **_: [0.0] * len(completions))
    trainer.train()
    rows = list(replaced_rows(trainer))
    assert len(rows) == 5 * 4 * GROUP_SIZE
    for output, _, row, group, k in rows:
        assert group.group_size == GROUP_SIZE
        end, length = int(group.completion_lengths[: k + 1].sum()), int(group.completion_lengths[k])
        assert output["tool_mask"][row][:length].tolist() == group.loss_mask[end - length : end].astype(int).tolist()
        sign = torch.sign(torch.tensor(group.advantages[k]))
        assert torch.equal(
            torch.sign(output["advantages"][row][:length]) * output["tool_mask"][row][:length],
            sign * output["tool_mask"][row][:length],
        )
    assert metrics_of(trainer, "frac_reward_zero_std") == [0.0] * 5


def test_evaluation_neither_uses_nor_fills_the_pool(tmp_path, server):
    trainer = make_trainer(
        tmp_path,
        replay=server.address,
        eval_dataset=make_dataset(4),
        num_generations_eval=2,
        per_device_eval_batch_size=4,
    )
    trainer.train()
    before = trainer.pool.client.server_info().tables["replay"]
    metrics = trainer.evaluate()
    after = trainer.pool.client.server_info().tables["replay"]
    assert after.inserts == before.inserts
    assert after.samples == before.samples
    assert before.samples > 0
    assert "eval_reward" in metrics
    assert not any("replay" in name for name in metrics)


def test_drop_masks_what_the_pool_cannot_replace(tmp_path):
    trainer = make_trainer(tmp_path, replay_on_empty="drop", reward=lambda completions, **_: [1.0] * len(completions))
    trainer.train()
    assert all(not output["tool_mask"][output["completion_mask"].bool()].any() for _, output, _ in trainer.steps)
    assert metrics_of(trainer, "replay/groups_missing") == [4.0] * 5


def test_wait_ends_with_the_reason_when_nobody_fills_the_pool(tmp_path):
    trainer = make_trainer(
        tmp_path,
        replay_on_empty="wait",
        replay_timeout=0.2,
        reward=lambda completions, **_: [1.0] * len(completions),
    )
    with pytest.raises(DeadlineExceededError, match="replay: sampling blocked"):
        trainer.train()


def test_a_share_of_the_step_comes_from_the_pool_and_the_groups_it_displaces_are_stored(tmp_path, server):
    trainer = make_trainer(tmp_path, replay=server.address, replay_share=0.5)
    trainer.train()
    assert all(len(step.replaced) >= 2 for step, _, _ in trainer.steps[2:])
    displaced = [
        (step, model, g)
        for step, _, model in trainer.steps
        for g in step.replaced
        if not is_zero_variance(step.rewards_BF[g * GROUP_SIZE : (g + 1) * GROUP_SIZE, 0].tolist())
    ]
    client = trainer.pool.client
    items = client.get([item.key for item in client.list_items("replay", limit=100).items])
    stored = {tuple(item.group.completion_ids.tolist()): item.group for item in items}
    assert displaced
    for step, model, g in displaced:
        completions = step.fresh.completion_ids[g * GROUP_SIZE : (g + 1) * GROUP_SIZE]
        group = stored[tuple(token for each in completions for token in each)]
        for k, completion in enumerate(completions):
            with torch.no_grad():
                expected = logprobs_of(model, group.prompt_ids.tolist(), completion)
            torch.testing.assert_close(stored_row(group, k)[2], expected, atol=1e-4, rtol=1e-4)


def test_the_pool_inside_the_process_holds_at_most_its_size(tmp_path):
    trainer = make_trainer(tmp_path, replay_buffer_size=3)
    trainer.train()
    table = trainer.pool.client.server_info().tables["replay"]
    assert table.size <= 3
    assert sum(metrics_of(trainer, "replay/groups_replaced")) > 0


def test_a_plain_grpo_config_gets_the_defaults(tmp_path):
    trainer = make_trainer(tmp_path, trainer_class=ReplayGRPOTrainer, config_class=trl.GRPOConfig, max_steps=2)
    trainer.train()
    assert trainer.pool.table == "replay"
    assert len(metrics_of(trainer, "replay/fresh_reward")) == 2


def test_a_size_of_zero_leaves_trl_alone(tmp_path):
    trainer = make_trainer(tmp_path, replay_buffer_size=0, max_steps=1)
    trainer.train()
    assert trainer.pool is None
    assert not any("replay" in name for entry in trainer.state.log_history for name in entry)


def test_rows_with_images_are_left_to_trl(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path)
    monkeypatch.setattr(trl.GRPOTrainer, "_generate_and_score_completions", lambda self, inputs: {"rows": inputs})
    trainer.model.train()
    rows = [{"prompt": "1", "image": object()}]
    assert trainer._generate_and_score_completions(rows) == {"rows": rows}
    assert trainer.pool.client.policy().version == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"replay_share": 1.0}, "replay_share must be from 0 to 0.9, not 1.0"),
        ({"replay_buffer_size": -1}, "replay_buffer_size must be at least 0, not -1"),
        ({"replay_clip_max": 0.0}, "replay_clip_max must be above 0, not 0.0"),
        ({"replay_on_empty": "hope"}, "replay_on_empty must be one of keep, drop, wait, not 'hope'"),
        ({"replay_on_unavailable": "wait"}, "replay_on_unavailable must be one of continue, raise, not 'wait'"),
    ],
)
def test_settings_out_of_range_are_refused(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, **settings)


def test_a_table_that_the_server_lacks_is_refused_at_the_start(tmp_path, server):
    with pytest.raises(TableNotFoundError, match="'pool'"):
        make_trainer(tmp_path, replay=server.address, replay_table="pool")


SPLIT = {"sequence_counts": (2, 1, 1, 1), "lengths": (1, 1, 1, 1, 1)}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (SPLIT, "sequence_counts with several sequences for a rollout"),
        ({"token_advantages": [0.5] * 4}, "token_advantages"),
        ({"prompt": (5, 4000)}, "the token 4000 of another tokenizer (this model has "),
    ],
)
def test_a_group_that_trl_has_no_place_for_is_put_aside_with_its_key(tmp_path, server, caplog, fields, words):
    group = make_group(**({"lengths": (1, 1, 1, 1), "rewards": (0, 0, 1, 1)} | fields))
    with ReplayClient(server.address) as client:
        key = client.insert(group, {"replay": 1.0})
    trainer = make_trainer(tmp_path, replay=server.address, reward=lambda completions, **_: [1.0] * len(completions))
    trainer.train()
    assert [log["replay/groups_unusable"] for log in trainer.state.log_history if "replay/groups_unusable" in log]
    [warning] = [line for line in caplog.messages if "is rejected" in line]  # once, however often it is drawn
    assert f"key {key} in table 'replay' has {words}" in warning


def test_a_run_that_goes_on_says_that_the_pool_inside_the_process_is_empty(tmp_path, server, caplog):
    few = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    make_trainer(tmp_path, **few).train()
    assert "empty pool" not in caplog.text
    for own in ({"replay": server.address}, {}):
        make_trainer(tmp_path, **few | own | {"max_steps": 2}).train(
            resume_from_checkpoint=str(tmp_path / "checkpoint-1")
        )
        assert ("the run goes on after step 1 with an empty pool" in caplog.text) is (not own)


def test_a_trl_that_scores_elsewhere_is_refused(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path)
    generate = copy.copy(trl.GRPOTrainer._generate)
    monkeypatch.setattr(trl.GRPOTrainer, "_generate", lambda self, prompts: generate(self, prompts)[:7])
    with pytest.raises(ImportError, match="_generate returns 7 values, not 8"):
        trainer.train()


def test_the_script_of_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    (page,) = [each for each in blocks(ROOT / "docs/how-to/trl.md") if each.title == "grpo.py"]
    exec(page.text, names)
    tokenizer = make_tokenizer()
    trainer = names["train"](
        make_model(vocabulary=len(tokenizer)),
        make_dataset(),
        short_is_good,
        tokenizer,
        max_steps=3,
        logging_steps=1,
        report_to="none",
        use_cpu=True,
        bf16=False,
    )
    assert len(metrics_of(trainer, "replay/fresh_reward")) == 3


def test_a_script_for_trls_removed_buffer_runs_with_another_import(tmp_path):
    """The settings, the reward and the calls are those of the example in TRL's documentation."""
    make_model().save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    chance = torch.Generator().manual_seed(0)

    def custom_reward_func(completions, **kwargs):
        if torch.rand(1, generator=chance).item() < 0.25:
            return [0] * len(completions)
        return torch.rand(len(completions), generator=chance).tolist()

    training_args = GRPOWithReplayBufferConfig(
        output_dir=str(tmp_path / "run"),
        learning_rate=1e-4,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=8,
        replay_buffer_size=8,
        report_to="none",
        use_cpu=True,  # the tests' own, as max_steps is
        max_steps=12,
    )
    trainer = GRPOWithReplayBufferTrainer(
        model=str(tmp_path / "model"),
        reward_funcs=[custom_reward_func],
        args=training_args,
        train_dataset=make_dataset(),
    )
    before = {name: parameter.clone() for name, parameter in trainer.model.named_parameters()}
    trainer.train()
    assert any(not torch.equal(before[name], parameter) for name, parameter in trainer.model.named_parameters())
    assert sum(metrics_of(trainer, "replay/groups_replaced")) > 0

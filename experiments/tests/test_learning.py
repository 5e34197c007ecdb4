"""The experiment on learning: tasks, statistics, and runs of its loop on a task that random weights can solve."""

import json
import math
import random

import numpy as np
import pytest
import torch

from examples.demo import task as demo
from experiments.learning import loop, model, page, report, run, statistics
from experiments.learning.arms import ARMS
from experiments.learning.tasks import TASKS, Task, make_problems
from replay_client.scoring import group_advantages
from replay_client.testing import make_group
from replay_trainer.batching import to_batch
from replay_trainer.logprobs import LogprobModel


def record(
    rates, *, arm="plain", seed=0, tokens_a_point=100, trained_a_token=1.0, engine="in-process", learning_rate=1e-4
):
    """A run whose curve has these solve rates at equal distances."""
    curve = [[i * tokens_a_point, i * tokens_a_point * trained_a_token, i, i, i, rate] for i, rate in enumerate(rates)]
    settings = {"task": "sums", "regime": "rare", "seed": seed, "learning_rate": learning_rate}
    return {"arm": arm, **settings, "engine": engine, "curve": curve}


@pytest.mark.parametrize("name", list(TASKS))
def test_problems_are_distinct_and_split_without_overlap_and_the_same_for_the_same_seed(name):
    problems, again = make_problems(TASKS[name], 3), make_problems(TASKS[name], 3)
    assert problems == again != make_problems(TASKS[name], 4)
    prompts = [row["prompt"] for part in (problems.warm_up, problems.train, problems.held_out) for row in part]
    assert len(prompts) == len(set(prompts)) == 3000 + 512 + 512
    assert max(len(text) for row in problems.held_out for text in model.answer_tokens(row)) <= TASKS[name].max_tokens


def test_answers_are_right():
    rng = random.Random(0)
    for _ in range(200):
        prompt, answer = TASKS["steps"].problem(rng)
        first, second, third = map(int, prompt[:-1].split("+"))
        assert [int(part[::-1]) for part in answer.split()] == [first + second, first + second + third]
        prompt, answer = TASKS["sort"].problem(rng)
        assert sorted(prompt[:-1]) == list(answer)


@pytest.mark.parametrize(
    ("setting", "rates"),
    [
        (["--tasks", "sums", "--regimes", "rare"], [1e-4]),
        (["--tasks", "sort", "--regimes", "rare"], [1e-4]),
        (["--tasks", "steps", "--regimes", "late"], [1e-4]),
        (["--tasks", "steps", "--regimes", "late", "--learning-rate", "3e-4"], [3e-4]),
        (["--tasks", "steps", "--regimes", "late", "--tune"], [1e-4, 2e-4, 3e-4]),
    ],
    ids=["tuned", "a task that was not tuned", "a regime that was not tuned", "given", "to tune"],
)
def test_what_was_tuned_on_a_pretrained_model_is_no_learning_rate_of_a_tiny_one(setting, rates):
    arguments = run.parse([*setting, "--seeds", "0", "--arms", "plain"])
    assert [rate for _, _, _, _, rate, _ in run.jobs(arguments)] == rates


def test_the_exact_solve_rate_is_the_mean_probability_of_the_answers():
    policy, rows = demo.make_model(0).eval(), make_problems(TASKS["sums"], 0).held_out[:5]
    ids, labels = demo.supervised_batch(rows)
    groups = [
        make_group(prompt=demo.encode(row["prompt"]), completions=model.answer_tokens(row), rewards=[1.0])
        for row in rows
    ]
    batch = to_batch(groups)
    with torch.no_grad():
        logprobs_BT, _ = LogprobModel(policy, packing=False)(batch)
    expected = float(torch.where(batch.mask_BT, logprobs_BT, 0.0).sum(1).exp().mean())
    assert demo.solve_rate(policy, ids, labels) == pytest.approx(expected, rel=1e-4)


def test_sampled_groups_carry_the_logprobs_and_rewards_of_their_own_tokens():
    policy, rows = demo.make_model(0).eval(), make_problems(TASKS["sums"], 0).train[:3]
    groups = model.sample_groups(policy, rows, 4, 6, version=7, random_source=torch.Generator().manual_seed(0))
    batch = to_batch(groups)
    with torch.no_grad():
        logprobs_BT, _ = LogprobModel(policy, packing=False)(batch)
    mask = batch.mask_BT
    assert torch.allclose(logprobs_BT[mask], batch.rollout_logprobs_BT[mask], atol=1e-4)
    assert {group.policy_version for group in groups} == {7}
    for group in groups:
        assert group.completion_ids.size == group.completion_lengths.sum() <= 4 * 6
        assert np.array_equal(group.advantages, group_advantages(group.rewards))


# Random weights solve it now and then: the answer is to stop at once.
COIN = Task("coin", lambda rng: (f"{rng.randrange(10**6)}=", ""), max_tokens=2)


@pytest.mark.parametrize("name", ["plain", "replace", "share50", "dynamic", "stale16-mask"])
def test_every_kind_of_arm_spends_its_budget_and_reports_where_it_stood(name, monkeypatch, tmp_path):
    problems = make_problems(COIN, 0)
    monkeypatch.setattr(loop, "warm_start", lambda *_: (demo.make_model(0).eval(), problems))
    monkeypatch.setattr(loop, "load_task", lambda _: COIN)
    arm = ARMS[name]
    done = loop.run(arm, loop.Settings("coin", "rare", 0, 1e-4, 1000), tmp_path)
    curve = np.array(done["curve"])
    assert (np.diff(curve, axis=0)[:, :5] > 0).all()
    assert curve[-1, statistics.GENERATED] >= 1000
    assert (done["means"]["replayed"] > 0) == (name in ("replace", "share50"))
    if name == "share50":
        assert curve[-1, statistics.TRAINED] > curve[-1, statistics.GENERATED]


def test_a_run_repeats_exactly(monkeypatch, tmp_path):
    problems = make_problems(COIN, 0)
    monkeypatch.setattr(loop, "load_task", lambda _: COIN)
    curves = []
    for _ in range(2):
        monkeypatch.setattr(loop, "warm_start", lambda *_: (demo.make_model(0).eval(), problems))
        done = loop.run(ARMS["share50"], loop.Settings("coin", "rare", 0, 1e-4, 500), tmp_path)
        curves.append([(point[0], point[1], point[-1]) for point in done["curve"]])
    assert curves[0] == curves[1]


def test_costs_are_interpolated_where_a_curve_crosses_a_level():
    curve = np.array(record([0.0, 0.1, 0.3], trained_a_token=2.0)["curve"], dtype=float)
    assert statistics.cost_at(curve, 0.2, (1, 0, 0, 0, 0)) == pytest.approx(150)
    assert statistics.cost_at(curve, 0.2, (10, 1, 0, 0, 0)) == pytest.approx(1500 + 300)
    assert statistics.cost_at(curve, 0.0, (1, 0, 0, 0, 0)) == 0
    assert statistics.cost_at(curve, 0.4, (1, 0, 0, 0, 0)) == math.inf


def test_ratios_are_to_the_best_that_the_baseline_reaches():
    slow, fast = record([0.0, 0.1, 0.2, 0.3, 0.4]), record([0.0, 0.2, 0.4, 0.6, 0.8])
    weights = report.GENERATED_ONLY
    # Smoothed over neighbours the slow curve ends at 0.35, and the fast one has 0.3 and 0.4 at its first two points.
    assert statistics.ratio_to(fast, slow, weights) == pytest.approx(150 / 400)
    assert statistics.ratio_to(slow, slow, weights) == 1.0
    assert statistics.ratio_to(slow, fast, weights) == math.inf
    assert math.isnan(statistics.ratio_to(fast, record([0.5, 0.1, 0.1, 0.1]), weights))


def test_medians_over_seeds_count_runs_that_never_got_there():
    assert statistics.interval([0.5, math.inf, 0.7]).median == 0.7
    assert statistics.interval([0.5, math.inf, math.inf]).median == math.inf
    found = statistics.interval([0.4, 0.5, 0.6, 0.7, 0.8])
    assert (found.median, found.low, found.high) == (0.6, 0.4, 0.8)


def test_the_table_pairs_runs_by_seed():
    runs = [record([0.0, 0.1, 0.2, 0.3, 0.4], seed=seed) for seed in (0, 1)]
    runs += [record([0.0, 0.2, 0.4, 0.6, 0.8], arm="half", seed=seed) for seed in (1, 2)]
    (row,) = [line for line in report.table(runs) if "| half of the batch |" in line]
    assert "**0.37** [0.37, 0.37]" in row  # of seed 1 alone
    assert "| 2 |" in row
    (row,) = report.pair_table(runs, [("half", "plain"), ("quarter", "plain")])[2:]
    assert "| half of the batch / plain | 1 | **0.37** [0.37, 0.37]" in row


def test_the_short_table_has_a_ratio_and_its_seeds_for_each_pair_that_was_run():
    plain, recipe = [0.0, 0.1, 0.2, 0.3, 0.4], [0.0, 0.2, 0.4, 0.6, 0.8]
    runs = [record(plain, seed=seed) for seed in (0, 1)] + [record(plain, arm="half", engine="vllm")]
    runs += [record(recipe, arm="small50-right", seed=seed) for seed in (1, 2)]
    (row,) = report.short_table(runs)[2:]
    assert row.startswith("| sums, rare | **0.37** [0.37, 0.37] (1 seed) |")
    assert row.count("seed") == 1


def test_runs_through_the_whole_system_are_compared_among_themselves():
    runs = [record([0.0, 0.1, 0.2, 0.3, 0.4]), record([0.0, 0.2, 0.4, 0.6, 0.8], arm="half", engine="vllm")]
    assert list(report.by_setting(runs)) == ["sums, rare", "sums, rare, vllm"]
    (row,) = [line for line in report.table(runs) if "| half of the batch |" in line]
    assert "0.37" not in row


def test_runs_with_another_learning_rate_are_compared_among_themselves():
    runs = [record([0.0, 0.1, 0.2]), record([0.0, 0.1, 0.3], learning_rate=3e-4)]
    assert list(report.by_setting(runs)) == ["sums, rare", "sums, rare, 0.0003"]


def test_two_runs_of_one_arm_and_seed_are_not_compared_as_one():
    with pytest.raises(ValueError, match="two runs of sums, rare, plain, seed 0"):
        report.table([record([0.0, 0.1]), record([0.0, 0.2])])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("text\n", "text\n"),
        (
            "<!-- table: none.json sums -->\n\n| old |\n| row |\n\nafter\n",
            "<!-- table: none.json sums -->\n\n{}\n\nafter\n",
        ),
        ("<!-- table: none.json -->\nafter\n", "<!-- table: none.json -->\n\n{}\n\nafter\n"),
    ],
    ids=["no table", "in the place of an old one", "a first one"],
)
def test_a_page_gets_the_tables_that_its_comments_name(text, expected, tmp_path):
    once = page.renewed(text, tmp_path)
    assert once == expected.format("\n".join(report.short_table([])))
    assert page.renewed(once, tmp_path) == once


def test_a_table_of_a_page_has_the_tasks_that_its_comment_names(tmp_path):
    runs = [
        record([0.0, 0.1, 0.2], arm=arm) | {"task": task} for task in ("sums", "sort") for arm in ("plain", "quarter")
    ]
    (tmp_path / "runs.json").write_text(json.dumps(runs))
    assert "| sort, rare |" in page.renewed("<!-- table: runs.json -->\n", tmp_path)
    one = page.renewed("<!-- table: runs.json sums -->\n", tmp_path)
    assert "| sums, rare |" in one
    assert "sort" not in one

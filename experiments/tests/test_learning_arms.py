"""The rivals and controls of the experiment on learning, and the variety that it measures."""

import random

import numpy as np
import pytest
import torch

from examples.demo import task as demo
from experiments.learning import loop, model, report, run, statistics
from experiments.learning.arms import ARMS
from experiments.learning.stored import DistinctAnswers
from experiments.learning.tasks import TASKS, Task, make_problems, right_texts
from experiments.learning.variety import HeldOut
from replay_client.testing import make_group

# Random weights solve it now and then: the answer is to stop at once.
COIN = Task("coin", lambda rng: (f"{rng.randrange(10**6)}=", ""), max_tokens=2)


def run_coin(name, monkeypatch, tmp_path, *, budget=1000):
    monkeypatch.setattr(loop, "warm_start", lambda *_: (demo.make_model(0).eval(), make_problems(COIN, 0)))
    monkeypatch.setattr(loop, "load_task", lambda _: COIN)
    return loop.run(ARMS[name], loop.Settings("coin", "rare", 0, 1e-4, budget), tmp_path)


def test_each_right_text_of_a_prompt_is_stored_once():
    answers = DistinctAnswers()
    group = make_group(completions=[[5], [6], [5], [7]], rewards=[1.0, 1.0, 1.0, 0.0])
    assert [each.completion_ids.tolist() for each in answers.new(group)] == [[5], [6]]
    assert answers.new(group) == []
    other = make_group(completions=[[5], [7]], rewards=[1.0, 0.0], prompt_id="another")
    assert [each.completion_ids.tolist() for each in answers.new(other)] == [[5]]


def test_an_answer_without_an_advantage_is_stored_when_it_has_one():
    answers = DistinctAnswers()
    assert answers.new(make_group(completions=[[5], [5]], rewards=[1.0, 1.0])) == []
    later = make_group(completions=[[5], [6]], rewards=[1.0, 0.0])
    assert len(answers.new(later)) == 1


@pytest.mark.parametrize("name", ["small50-right", "small50-distinct"])
def test_an_arm_that_stores_right_answers_alone_trains_on_fewer_tokens_than_whole_groups(name, monkeypatch, tmp_path):
    whole, parts = (run_coin(arm, monkeypatch, tmp_path, budget=400) for arm in ("small50-opsm", name))
    assert parts["means"]["replayed"] > 0
    trained, generated = (parts["curve"][-1][column] for column in (statistics.TRAINED, statistics.GENERATED))
    assert 0 < trained / generated < whole["curve"][-1][statistics.TRAINED] / whole["curve"][-1][statistics.GENERATED]
    # Wrong stored answers are not there to drift, or to be masked.
    assert "drift_wrong" in whole["means"]
    assert "drift_wrong" not in parts["means"]


@pytest.mark.parametrize(("name", "updates"), [("quarter-opsm", 1), ("quarter-opsm-twice", 2), ("quarter-twice", 2)])
def test_each_update_on_the_same_groups_counts_as_trained_tokens(name, updates, monkeypatch, tmp_path):
    last = run_coin(name, monkeypatch, tmp_path, budget=300)["curve"][-1]
    assert last[statistics.TRAINED] == updates * last[statistics.GENERATED]


def test_a_second_update_on_the_same_groups_changes_what_the_model_has_learned(monkeypatch, tmp_path):
    once, twice = (run_coin(name, monkeypatch, tmp_path, budget=150) for name in ("quarter-opsm", "quarter-opsm-twice"))
    assert once["curve"][0] == twice["curve"][0]
    assert once["curve"][-1][statistics.SOLVE_RATE] != twice["curve"][-1][statistics.SOLVE_RATE]


def test_a_split_has_nine_right_answers_which_add_up_to_it():
    rng = random.Random(0)
    for _ in range(100):
        prompt, answer = TASKS["split"].problem(rng)
        texts = TASKS["split"].answers(prompt)
        assert answer in texts
        assert len(set(texts)) == 9
        for text in texts:
            first, second = text.split("+")
            assert int(first[::-1]) + int(second) == int(prompt[:-1])


def test_every_right_answer_is_rewarded():
    row = make_problems(TASKS["split"], 0).train[0]
    assert len(model.answer_tokens(row)) == 9
    assert sorted({ids[-1] for ids in model.answer_tokens(row)}) == [demo.EOS_ID]


def test_variety_is_computed_from_the_probability_of_each_right_answer():
    policy, rows = demo.make_model(0).eval(), make_problems(TASKS["split"], 0).held_out[:3]
    p_RA = np.array(
        [
            [demo.solve_rate(policy, *demo.supervised_batch([row | {"answer": text}])) for text in right_texts(row)]
            for row in rows
        ]
    )
    rate, variety = HeldOut(rows).measure(policy)
    assert rate == pytest.approx(p_RA.sum(1).mean(), rel=1e-3)
    assert variety.pass_at_8 == pytest.approx((1 - (1 - p_RA.sum(1)) ** 8).mean(), rel=1e-2, abs=1e-7)
    assert variety.distinct_at_8 == pytest.approx((1 - (1 - p_RA) ** 8).sum(1).mean(), rel=1e-2, abs=1e-7)
    share_RA = p_RA / p_RA.sum(1, keepdims=True)
    assert variety.answer_entropy == pytest.approx(-(share_RA * np.log(share_RA)).sum(1).mean(), rel=1e-3)


def test_with_one_right_answer_the_solve_rate_is_that_of_the_demo():
    policy, rows = demo.make_model(0).eval(), make_problems(TASKS["sums"], 0).held_out
    with torch.no_grad():
        rate, variety = HeldOut(rows).measure(policy)
    assert rate == demo.solve_rate(policy, *demo.supervised_batch(rows))
    assert variety.answer_entropy == 0


def test_the_table_of_varieties_compares_the_ends_by_seed():
    def measured(arm, seed, end):
        curve = [[i * 100, i * 100, i, i, i, 0.1] for i in range(3)]
        named = run_of | {"arm": arm, "seed": seed}
        return named | {"curve": curve, "variety": [[0.4, 0.5, 1.9], [end, 0.6, 1.0]]}

    run_of = {"task": "split", "regime": "rare", "learning_rate": 1e-4, "engine": "in-process"}
    old = run_of | {"arm": "plain", "task": "sums", "seed": 0, "curve": []}
    records = [measured("plain", 0, 0.5), measured("small50-opsm", 0, 0.75), measured("small50-opsm", 1, 0.1), old]
    rows = report.variety_table(records)[2:]
    assert len(rows) == 2
    assert "| stored groups whole, masked | 2 | 0.40 → 0.42 | **+0.250** [+0.250, +0.250] |" in rows[1]


def test_a_run_begins_when_the_file_that_pauses_it_is_gone(monkeypatch, tmp_path):
    pause, waits = tmp_path / "PAUSE", []
    pause.touch()

    def sleep(seconds):
        waits.append(seconds)
        if len(waits) == 3:
            pause.unlink()

    monkeypatch.setattr(run.time, "sleep", sleep)
    run.wait_while(pause)
    assert len(waits) == 3
    run.wait_while(pause)
    run.wait_while(None)
    assert len(waits) == 3

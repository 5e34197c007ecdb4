"""A TRL run that shares the server with other runs, between its own ranks, or loses it."""

from __future__ import annotations

import functools
import json
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from replay_client import ReplayClient
from replay_client.errors import ServerUnavailableError, TableNotFoundError
from tests.kit.processes import free_port, run_ranks, server_process

pytest.importorskip("trl", reason="pip install '.[trl]' in a clone of the repository")

from replay_adapters.trl_rows import fingerprint
from tests.adapters import run_trl_rank
from tests.adapters.trl_factories import (
    GROUP_SIZE,
    At,
    RecordingTrainer,
    make_trainer,
    metrics_of,
    short_is_good,
)


def start_ranks(folder: Path, **options: Any) -> list[str]:
    """The errors of two ranks."""
    (folder / "options.json").write_text(json.dumps(options))
    return run_ranks(2, run_trl_rank.main, folder)


def reports_of(folder: Path) -> list[dict[str, Any]]:
    """The reports of two ranks, which agree on the weights."""
    ranks = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert ranks[0]["weights"] == ranks[1]["weights"]
    return ranks


# ------------------------------------------------------------------------------------------------- between ranks


@pytest.mark.long
def test_groups_that_span_two_ranks_are_stored_and_replaced_as_a_whole(tmp_path, server):
    settings = {"per_device_train_batch_size": 6, "max_steps": 12, "replay": server.address}
    # 12 rows a step: the second of three groups has rows on both.
    assert start_ranks(tmp_path, settings=settings) == ["", ""]
    ranks = reports_of(tmp_path)
    with ReplayClient(server.address) as client:
        keys = [item.key for item in client.list_items("replay", limit=200).items]
        stored = {item.key: rows_of_group(item.group) for item in client.get(keys)}
    assert stored
    generated, spanning = [], 0
    for first, second in zip(ranks[0]["steps"], ranks[1]["steps"], strict=True):
        assert first["first"] == 0
        assert second["first"] == 6
        fresh, rows = first["fresh"] + second["fresh"], first["rows"] + second["rows"]
        advantages = first["advantages"] + second["advantages"]
        replaced = {int(g): key for each in (first, second) for g, key in each["keys"].items()}
        assert [*first["keys"]] == [g for g in first["keys"] if g in "01"]  # each is drawn by one rank
        assert [*second["keys"]] == [g for g in second["keys"] if g == "2"]
        for g in range(3):
            members = slice(g * GROUP_SIZE, (g + 1) * GROUP_SIZE)
            generated.append(fresh[members])
            if g in replaced:
                assert rows[members] == stored[replaced[g]]
                assert max(advantages[members]) > 0 > min(advantages[members])
                spanning += g == 1
            else:
                assert rows[members] == fresh[members]
    assert spanning > 0
    assert all(rows in generated for rows in stored.values())
    assert any(rows == fresh for rows in stored.values() for fresh in generated[1::3])


@pytest.mark.long
def test_two_ranks_share_the_server_of_the_first_and_train_on_different_groups(tmp_path):
    assert start_ranks(tmp_path) == ["", ""]
    ranks = reports_of(tmp_path)
    assert ranks[0]["address"] == ranks[1]["address"]
    for first, second in zip(ranks[0]["keys"], ranks[1]["keys"], strict=True):
        assert not {*first} & {*second}
    assert all(any(keys for keys in rank["keys"]) for rank in ranks)
    replaced = [float(len(a) + len(b)) for a, b in zip(ranks[0]["keys"], ranks[1]["keys"], strict=True)]
    assert ranks[0]["replaced"] == replaced
    assert ranks[0]["zero_std"][-1] == 0.0
    assert ranks[0]["versions"] == ranks[1]["versions"] == [*range(6)]


def rows_of_group(group: Any) -> list[list[list[int]]]:
    completions = [group.completion_ids[span].tolist() for span in group.sampled_spans()]
    return [[prompt.tolist(), ids] for prompt, ids in zip(group.prompts(), completions, strict=True)]


@pytest.mark.long
@pytest.mark.parametrize("choice", ["continue", "raise"])
def test_ranks_agree_on_what_to_do_without_the_server(tmp_path, choice):
    with server_process(tmp_path) as server:
        errors = start_ranks(
            tmp_path,
            settings={"replay": server.address, "replay_timeout": 1.0, "replay_on_unavailable": choice},
            kill={"process": server.process.pid, "step": 3},
        )
    if choice == "raise":
        assert all("ServerUnavailableError: the replay server is away" in error for error in errors)
        return
    assert errors == ["", ""]
    ranks = reports_of(tmp_path)
    assert ranks[0]["unavailable"] == ranks[1]["unavailable"]
    assert ranks[0]["unavailable"][0] == 0.0
    assert ranks[0]["unavailable"][-2:] == [1.0, 1.0]


# ------------------------------------------------------------------------------------------------ without a server


@pytest.mark.long
def test_training_goes_on_with_fresh_rows_while_the_server_is_away_and_uses_it_again_when_it_is_back(tmp_path, caplog):
    address = f"127.0.0.1:{free_port()}"
    with server_process(tmp_path, address=address) as first:
        again = server_process(tmp_path, address=address)
        callbacks = [At(3, first.kill), At(6, again.__enter__)]
        trainer = make_trainer(tmp_path, replay=address, replay_timeout=0.5, callbacks=callbacks, max_steps=24)
        try:
            with caplog.at_level(logging.WARNING, "replay_trainer"):
                trainer.train()
            assert trainer.pool.client.policy().version == 23
            assert trainer.pool.client.server_info().tables["replay"].size > 0
        finally:
            again.__exit__(None, None, None)
    away, replaced = metrics_of(trainer, "replay/unavailable"), metrics_of(trainer, "replay/groups_replaced")
    assert trainer.state.global_step == 24
    assert away[:3] == [0.0] * 3
    assert away[3:6] == [1.0] * 3
    assert away[-1] == 0.0
    assert replaced[3:6] == [0.0] * 3
    assert sum(count for count, is_away in zip(replaced[6:], away[6:], strict=True) if not is_away) > 0
    told = [record.getMessage() for record in caplog.records]
    assert len([line for line in told if "training goes on with fresh groups alone" in line]) == 1
    assert len([line for line in told if "is back" in line]) == 1


def test_a_server_that_stays_away_ends_the_run_if_the_user_says_so(tmp_path):
    with server_process(tmp_path) as server:
        trainer = make_trainer(
            tmp_path,
            replay=server.address,
            replay_timeout=0.5,
            replay_on_unavailable="raise",
            callbacks=[At(2, server.kill)],
        )
        with pytest.raises(ServerUnavailableError, match="the replay server is away: no replay server answers at"):
            trainer.train()
    assert trainer.state.global_step == 2


def replay_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name in ("replay-server", "replay-client")}


def test_a_trainer_with_ranks_on_another_machine_is_refused_and_leaves_no_server(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "0")  # this machine has fewer ranks than the run, which has one
    before = replay_threads()
    with pytest.raises(ValueError, match="which other machines do not reach: start `replay serve`"):
        make_trainer(tmp_path)
    assert replay_threads() == before


def test_a_trainer_whose_table_is_missing_leaves_no_client(tmp_path, server):
    before = replay_threads()
    with pytest.raises(TableNotFoundError, match="absent"):
        make_trainer(tmp_path, replay=server.address, replay_table="absent")
    assert replay_threads() == before


# ----------------------------------------------------------------------------------------------------- rewards


class RewardsOfItsOwn(RecordingTrainer):
    """Replaces TRL's rewards by three times `short_is_good`."""

    calls = 0

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        self.calls += 1
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        assert not rewards.any()
        return rewards + 3.0 * torch.tensor(short_is_good(completions))[:, None]


def test_rewards_of_a_subclass_decide_what_is_replaced_and_are_stored(tmp_path):
    trainer = make_trainer(
        tmp_path, trainer_class=RewardsOfItsOwn, reward=lambda completions, **_: [0.0] * len(completions), max_steps=8
    )
    trainer.train()
    assert trainer.calls == 8  # replaced rows keep the rewards that they were stored with
    client = trainer.pool.client
    stored = [item.group for item in client.get([item.key for item in client.list_items("replay").items])]
    assert stored
    assert {reward for group in stored for reward in group.rewards.tolist()} == {0.0, 3.0}
    replaced = metrics_of(trainer, "replay/groups_replaced")
    assert sum(replaced) > 0
    means = zip(metrics_of(trainer, "reward"), metrics_of(trainer, "replay/fresh_reward"), replaced, strict=True)
    for reward, fresh, count in means:
        assert 0 <= reward <= 3
        assert (reward == pytest.approx(fresh)) or count


def digits(completions, **_):
    return short_is_good(completions)


def nothing(completions, **_):
    return [0.0] * len(completions)


@pytest.mark.long
def test_groups_of_another_objective_are_counted_and_left_out_if_the_user_says_so(tmp_path, server, caplog):
    shared = {"replay": server.address, "max_steps": 4}
    make_trainer(tmp_path / "first", reward=digits, **shared).train()
    for refuse, begin in ((False, 3), (True, 6)):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "replay_trainer"):
            other = make_trainer(tmp_path / str(refuse), reward=nothing, replay_same_rewards=refuse, **shared)
            other.train()
        # It goes on counting where it found the server, so that ages stay ages.
        assert [step.version for step, _, _ in other.steps] == [*range(begin, begin + 4)]
        replaced, others = metrics_of(other, "replay/groups_replaced"), metrics_of(other, "replay/other_rewards")
        assert sum(others) > 0
        assert replaced == ([0.0] * 4 if refuse else others)
        (told,) = [record.getMessage() for record in caplog.records if "other reward functions scored" in record.msg]
        assert "(digits; this run: nothing)" in told
    again = make_trainer(tmp_path / "again", reward=digits, replay_same_rewards=True, **shared)
    again.train()
    assert sum(metrics_of(again, "replay/groups_replaced")) > 0
    assert metrics_of(again, "replay/other_rewards") == [0.0] * 4


def above(limit: float) -> Any:
    def reward(completions, **_):
        return [float(len(each) > limit) for each in completions]

    return reward


class Judge:
    def __call__(self, completions, **_):
        return [1.0 for _ in completions]


class OtherJudge:
    def __call__(self, completions, **_):
        return [2.0 for _ in completions]


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (digits, digits, True),
        (above(1), above(1), True),
        (above(1), above(2), False),
        (
            lambda completions: [c in {"a", "b"} for c in completions],
            lambda completions: [c in {"b", "a"} for c in completions],
            True,
        ),
        (lambda completions: [1.0], lambda completions: [2.0], False),
        (functools.partial(above, 1), functools.partial(above, 2), False),
        (Judge(), Judge(), True),
        (Judge(), OtherJudge(), False),
        (Judge, OtherJudge, False),
    ],
    ids=["itself", "one value", "two values", "sets", "constants", "partials", "one class", "classes", "types"],
)
def test_a_fingerprint_tells_reward_functions_of_one_name_apart(first, second, same):
    assert (fingerprint(["reward"], [first]) == fingerprint(["reward"], [second])) == same
    assert fingerprint(["reward"], [first]) != fingerprint(["other"], [first])

"""Groups that cannot be trained on are named, deleted and left out; too many of them stop the run."""

from __future__ import annotations

import logging
import math
from typing import Any

import numpy as np
import pytest
from transformers import GPT2Config, GPT2LMHeadModel, OPTConfig, OPTForCausalLM, Qwen2ForCausalLM

from replay_client import Sample
from replay_client.errors import TableNotFoundError
from replay_client.rollout import RolloutGroup
from replay_client.testing import make_group
from replay_trainer import TableEvaluation
from replay_trainer.groups import Inspector, ModelLimits, why_unusable
from replay_trainer.ranks import Ranks
from tests.kit.clients import FakeClient
from tests.kit.groups import make_sample
from tests.kit.models import make_model
from tests.kit.trainers import lines_of, make_batches, make_trainer

SMALL = {"vocab_size": 32, "n_embd": 32, "n_layer": 1, "n_head": 2}
OPT = OPTConfig(
    vocab_size=32, hidden_size=32, num_hidden_layers=1, ffn_dim=32, max_position_embeddings=64, num_attention_heads=2
)


def changed(**fields: Any) -> Sample:
    """A group with values that a RolloutGroup would refuse."""
    group = make_group(rewards=[1.0, 0.0], completions=[[5, 6], [7]])
    for name, value in fields.items():
        setattr(group, name, np.array(value, getattr(group, name).dtype) if isinstance(value, list) else value)
    return make_sample(group, key=77)


def foreign() -> Sample:
    sample = make_sample(make_group(), key=77)
    sample.payload = b"not of ours"
    return sample


MODEL = ModelLimits(vocabulary=16)
BAD: dict[str, tuple[Sample, str]] = {
    "a token beyond the vocabulary": (
        changed(completion_ids=[5, 16, 7]),
        "completion_ids holds the token 16, and the model has the tokens 0 to 15",
    ),
    "a prompt beyond the vocabulary": (changed(prompt_ids=[3, 900]), "prompt_ids holds the token 900"),
    "a negative token": (changed(completion_ids=[5, -1, 7]), "completion_ids holds the token -1"),
    "a NaN advantage": (changed(advantages=[math.nan, 0.0]), "advantages holds nan"),
    "an infinite advantage": (changed(advantages=[0.0, math.inf]), "advantages holds inf"),
    "an advantage beyond float32's squares": (changed(advantages=[1e30, 0.0]), "holds 1e+30, beyond ±1e+09"),
    "a NaN advantage of a token": (
        changed(token_advantages=np.array([0.5, math.nan, 0.0], np.float32)),
        "token_advantages holds nan",
    ),
    "a NaN reward": (changed(rewards=[math.nan, 0.0]), "rewards holds nan"),
    "a reward that is too large": (changed(rewards=[0.0, -3e38]), "rewards holds -3e+38, beyond ±1e+09"),
    "foreign bytes": (foreign(), "not a rollout group: 11 bytes that begin with b'not of o'"),
    "empty completions": (make_sample(make_group(completions=[[], []])), "all its completions are empty"),
    "an empty prompt": (changed(prompt_ids=[]), "prompt_ids is empty"),
    "a probability above 1": (changed(rollout_logprobs=[-1.0, 0.7, -1.0]), "rollout_logprobs holds 0.7"),
    "greedy sampling": (changed(sampling={"temperature": 0}), "sampled at temperature 0"),
    "almost greedy": (changed(sampling={"temperature": 1e-30}), "at temperature 1e-30, not from 0.001 to 1000"),
    "sampling that is too hot": (changed(sampling={"temperature": 1e30}), "sampled at temperature 1e+30"),
    "a temperature that is no number": (changed(sampling={"temperature": "hot"}), "at temperature 'hot'"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_trained_on_has_a_reason(name):
    sample, words = BAD[name]
    assert words in why_unusable(sample, MODEL)


LONG = make_group(rewards=[1.0, 0.0], prompt=[3] * 60, completions=[[5], [6] * 5], logprobs=-1.0)


@pytest.mark.parametrize(
    ("model", "most", "words"),
    [
        (GPT2LMHeadModel(GPT2Config(n_positions=64, **SMALL)), None, "have 65 tokens, and the model has 64 positions"),
        (OPTForCausalLM(OPT), None, "have 65 tokens, and the model has 64 positions"),
        (GPT2LMHeadModel(GPT2Config(n_positions=65, **SMALL)), None, ""),
        (make_model(), None, ""),  # Qwen2 computes positions, also beyond the 64 that its configuration names
        (make_model(), 65, "it has 66 tokens, more than max_group_tokens=65"),
        (make_model(), 66, ""),
    ],
    ids=["beyond the positions", "a table with two more rows", "at the last position", "no table", "above", "at most"],
)
def test_a_group_is_as_long_as_the_model_and_the_configuration_let_it(model, most, words):
    reason = why_unusable(make_sample(LONG), ModelLimits.of(model, most))
    assert words in reason
    assert bool(words) == bool(reason)


def test_extras_that_are_inputs_of_the_model_are_named_once(tmp_path, caplog):
    class Seeing(Qwen2ForCausalLM):
        def forward(self, input_ids: Any = None, pixel_values: Any = None, **others: Any) -> Any:
            return super().forward(input_ids, **others)

    batches = make_batches(2)
    for batch in batches:
        extras = {"pixel_values": np.zeros((2, 3), np.float32), "ref_logprobs": np.zeros(3, np.float32)}
        batch[0] = make_sample(make_group(rewards=[1.0, 0.0], extras=extras))
    seeing = Seeing(make_model().config)
    make_trainer(FakeClient(batches), tmp_path, model=seeing, max_steps=2, groups_per_step=3).train()
    (said,) = [message for message in caplog.messages if "extras" in message]
    assert "groups have pixel_values among their extras" in said


def test_what_can_be_trained_on_has_no_reason():
    group = make_group(completions=[[5, 15], []], logprobs=[math.nan, 0.0], sampling={"temperature": 0.5})
    assert why_unusable(make_sample(group), MODEL) == ""
    assert why_unusable(make_sample(make_group(completions=[[5], [900]]))) == ""


@pytest.mark.parametrize("name", ["a token beyond the vocabulary", "foreign bytes"])
def test_a_bad_fresh_group_leaves_the_step_and_the_server(tmp_path, caplog, name):
    batches = make_batches(3)
    batches[1][1], words = BAD[name]
    client = FakeClient(batches, pool=[batches[1][1]])  # forward_to has put it into the pool
    make_trainer(client, tmp_path, groups_per_step=3).train()
    assert [line["train/groups_unusable"] for line in lines_of(tmp_path)] == [0, 1, 0]
    assert [line["train/groups"] for line in lines_of(tmp_path)] == [3, 2, 3]
    (said,) = [message for message in caplog.messages if "rejected" in message]
    assert "key 77 of table 'rollouts'" in said
    assert words in said
    assert client.pool == []


def test_a_bad_group_of_the_pool_replaces_nothing_and_leaves_the_pool(tmp_path):
    good = make_sample(make_group(rewards=[0.0, 1.0]), key=78)
    client = FakeClient(make_batches(4, zero_variance=1), pool=[foreign(), good])
    make_trainer(client, tmp_path, max_steps=2, groups_per_step=6, replay_share=0.5).train()
    assert [line["train/groups_unusable"] for line in lines_of(tmp_path)] == [1, 0]
    assert [line["replay/groups_replaced"] for line in lines_of(tmp_path)] == [1, 1]
    assert client.pool == [good]
    first, second = lines_of(tmp_path, "steps.jsonl")
    assert first["unusable"] == [{"key": 77, "table": "replay", "reason": why_unusable(foreign(), MODEL)}]
    assert second["unusable"] == []
    for line in (first, second):
        assert [group["key"] for group in line["trained"] if group["source"] == "replayed"] == [78]
        # The group that it replaced carried no gradient.
        assert len(line["left_out"]) == 1
        assert len({group["key"] for group in (*line["trained"], *line["left_out"])}) == 4


def test_a_step_without_bad_groups_never_stops_a_run():
    # The third step forgets the first, and with it the good groups that kept the share low.
    inspector = Inspector(FakeClient(), Ranks("cpu"), MODEL, "replay", 0.1)  # type: ignore[arg-type]
    good = make_sample(make_group(rewards=[0.0, 1.0]), key=78)
    for count, bad_count in ((64, 0), (90, 12), (20, 0)):
        bad = [foreign() for _ in range(bad_count)]
        inspector.usable([good] * (count - bad_count) + bad, "rollouts")
        assert len(inspector.end_draws()) == bad_count


def test_a_group_that_joins_the_pool_late_is_not_drawn_and_deleted_then():
    # The server forwards a fresh group when it learns that its batch arrived, which may be after the first deletion.
    client = FakeClient()
    inspector = Inspector(client, Ranks("cpu"), MODEL, "replay", 0.1)  # type: ignore[arg-type]
    assert inspector.usable([foreign()], "rollouts") == []
    assert [bad.key for bad in inspector.end_draws()] == [77]
    client.pool = [foreign()]
    assert inspector.bad_keys == {77}
    assert inspector.end_draws() == []
    assert client.pool == []
    inspector.end_draws()
    assert sorted(client.deleted) == [("replay", 77), ("replay", 77), ("rollouts", 77)]


def test_a_run_without_a_pool_puts_bad_groups_aside_too(tmp_path):
    class NoPool(FakeClient):
        def delete(self, table: str, keys: Any) -> Any:
            if table == "replay":
                raise TableNotFoundError("there is no table 'replay'")
            return super().delete(table, keys)

    batches = make_batches(3)
    batches[1][0] = foreign()
    client = NoPool(batches)
    make_trainer(client, tmp_path, zero_variance="none", groups_per_step=3).train()
    assert client.deleted == [("rollouts", 77)]
    assert [line["train/groups_unusable"] for line in lines_of(tmp_path)] == [0, 1, 0]


def test_too_many_bad_groups_stop_the_run_with_one_error_and_a_resume_goes_on(tmp_path):
    batches = make_batches(3)
    sound, batches[1][0] = batches[1][0], foreign()
    client = FakeClient(batches)
    with pytest.raises(
        RuntimeError, match=r"1 of the last 6 groups .* max_unusable_fraction=0\. .*key 77 of table 'rollouts'"
    ):
        make_trainer(client, tmp_path, max_unusable_fraction=0.0, groups_per_step=3).train()
    assert client.version == 1
    assert ("replay", 77) in client.deleted
    batches[1][0] = sound
    make_trainer(client, tmp_path, max_unusable_fraction=0.0, resume=True, groups_per_step=3).train()
    assert [line["step"] for line in lines_of(tmp_path)] == [1, 2, 3]


def test_the_share_is_that_of_the_recent_groups(caplog):
    inspector = Inspector(FakeClient(), Ranks("cpu"), MODEL, "replay", 0.1)  # type: ignore[arg-type]
    good = make_sample(make_group())
    caplog.set_level(logging.ERROR)

    def step(bad: int, drawn: int = 50) -> None:
        inspector.usable([foreign()] * bad + [good] * (drawn - bad), "rollouts")
        inspector.end_draws()

    for _ in range(20):
        step(5)  # a tenth, as long as it goes on
    step(0)
    step(9)
    with pytest.raises(RuntimeError, match=r"11 of the last 100 groups"):
        step(2)


def test_an_evaluation_leaves_out_what_does_not_decode(tmp_path):
    greedy = make_group(rewards=[1.0, 0.0], sampling={"temperature": 0})  # no step could train on it
    held_out = [foreign(), changed(rewards=[math.nan, 0.0]), make_sample(greedy, key=9)]
    evaluation = TableEvaluation(FakeClient(pool=held_out), table="eval")
    make_trainer(FakeClient(make_batches(1)), tmp_path, max_steps=1, eval_every=1, evaluate=evaluation).train()
    assert lines_of(tmp_path)[0]["eval/groups"] == 1
    assert lines_of(tmp_path)[0]["eval/reward_mean"] == 0.5


def test_a_decoded_group_keeps_what_makes_it_bad():
    assert RolloutGroup.decode(changed(prompt_ids=[-3]).payload).prompt_ids.tolist() == [-3]

"""slime's rollout function, with slime's own types."""

from __future__ import annotations

import dataclasses
import functools
import logging
from argparse import Namespace
from typing import Any

import numpy as np
import pytest

from replay_client import ReplayClient
from replay_client.testing import make_group
from replay_server import ReplayServer
from tests.adapters.conformance import sample_factories
from tests.adapters.conformance.sources import missing
from tests.kit.processes import server_process

if why := missing("slime"):
    pytest.skip(why, allow_module_level=True)

from slime.observability.rollout_data_utils import validate_rollout_id_annotated
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.utils.types import Sample

from replay_adapters import slime
from replay_adapters.slime import generate_rollout

make_samples = functools.partial(sample_factories.make_samples, Sample)


PLANNED: list[list[list[Sample]]] = []


def planned_rollout(args: Namespace, rollout_id: int, data_source: object, evaluation: bool = False) -> object:
    """Stands where slime's SGLang rollout does."""
    if evaluation:
        return RolloutFnEvalOutput(data={"set": {}})
    return RolloutFnTrainOutput(samples=PLANNED[rollout_id], metrics={"own": 1.0})


def run(server: ReplayServer, *rollouts: list[list[Sample]], **settings: object) -> list[RolloutFnTrainOutput]:
    PLANNED[:] = rollouts
    settings["replay_address"] = server.address
    args = Namespace(replay_rollout_function=f"{__name__}.planned_rollout", **settings)
    return [generate_rollout(args, rollout_id, None) for rollout_id in range(len(rollouts))]


NAMES = (
    *("prompt", "tokens", "response", "response_length", "label", "reward", "loss_mask", "weight_versions"),
    *("remove_sample", "train_metadata", "status"),
)
"""What comes from the stored group; all else stays that of the place."""


def told(sample: Sample) -> dict[str, Any]:
    return {name: getattr(sample, name) for name in NAMES}


@pytest.mark.parametrize("key", [None, "score"])
def test_a_group_without_variance_becomes_a_stored_one_in_its_place(server, key):
    informative, barren = make_samples(0, [0.0, 1.0, 0.0], key=key), make_samples(7, [1.0, 1.0, 1.0], key=key)
    fresh = make_samples(8, [1.0, 0.0, 1.0], key=key)
    first, second = run(server, [informative], [fresh, barren], reward_key=key)
    assert first.samples == [informative]
    assert second.samples[0] == fresh
    for sample, source, place in zip(second.samples[1], informative, barren, strict=True):
        assert told(sample) == told(source)
        assert sample.rollout_log_probs == pytest.approx(source.rollout_log_probs)
        # slime groups and orders by these.
        assert sample.group_index == place.group_index
        assert sample.index == place.index
        assert sample.metadata == place.metadata
    assert second.metrics["own"] == 1.0
    assert second.metrics["replay/groups_replaced"] == 1
    assert second.metrics["replay/fresh_zero_variance"] == 0.5
    assert second.metrics["replay/staleness"] == 1.0


def test_informative_groups_are_stored_with_their_version(server):
    run(server, [make_samples(0, [0.0, 1.0])], [make_samples(1, [1.0, 0.0]), make_samples(2, [0.0, 0.0])])
    with ReplayClient(server.address) as client:
        items = client.list_items("replay", order_by="age", descending=True).items
        groups = [item.group for item in client.get([item.key for item in items])]
        assert client.policy().version == 1
    assert [group.rewards.tolist() for group in groups] == [[0.0, 1.0], [1.0, 0.0]]
    assert [group.policy_version for group in groups] == [0, 1]
    assert groups[0].loss_mask.tolist() == [True, False, True]


def test_groups_of_other_sizes_and_of_other_writers_are_not_used(server):
    with ReplayClient(server.address) as client:
        client.insert(make_group(lengths=(1, 2), rewards=(0.0, 1.0)), {"replay": 1.0})
    barren = make_samples(3, [1.0, 1.0])
    _, output = run(server, [make_samples(0, [0.0, 1.0, 1.0])], [barren])
    assert output.samples == [barren]
    assert output.metrics["replay/groups_missing"] == 1


def test_evaluation_is_slimes_own():
    args = Namespace(replay_rollout_function=f"{__name__}.planned_rollout", replay_address="127.0.0.1:1")
    assert generate_rollout(args, 0, None, evaluation=True) == RolloutFnEvalOutput(data={"set": {}})


def test_each_sample_comes_back_with_its_own_prompt_and_its_own_reward(server):
    informative = make_samples(0, [0.0, 1.0, 0.0], key="score")
    for k, sample in enumerate(informative):
        sample.tokens = [10, 11, *[30 + k] * k, *sample.tokens[2:]]
        sample.prompt, sample.label = f"prompt with {k} more", f"label {k}"
        sample.reward["other"], sample.reward["words"] = np.float32(k), ["a", k]
        sample.train_metadata = {"loss": "sft"} if k else None
    barren = make_samples(7, [1.0, 1.0, 1.0], key="score")
    barren[0].train_metadata = {"loss": "other"}
    _, second = run(server, [informative], [barren], reward_key="score")
    assert [told(sample) for sample in second.samples[0]] == [told(sample) for sample in informative]
    with ReplayClient(server.address) as client:
        (item,) = client.list_items("replay").items
        group = client.get([item.key])[0].group
    assert group.prompt_ids.tolist() == [10, 11]
    assert group.context_lengths is not None
    assert group.context_lengths.tolist() == [0, 1, 2]
    assert group.finish_reasons == ("stop", "length", "length")


def test_a_sample_that_slime_leaves_out_of_the_loss_is_stored_so_and_does_not_count_as_a_gradient(server):
    informative, others = make_samples(0, [0.0, 1.0, 0.5]), make_samples(1, [0.0, 1.0])
    informative[1].remove_sample = True
    for sample in others:
        sample.remove_sample = True
    barren = make_samples(7, [1.0, 1.0, 1.0], remove_sample=True)
    first, second = run(server, [informative, others], [barren])
    assert first.metrics["replay/fresh_zero_variance"] == 0.5  # nothing of the second group is trained on
    with ReplayClient(server.address) as client:
        (item,) = client.list_items("replay").items
        group = client.get([item.key])[0].group
    assert [group.trained_mask[span].any() for span in group.sampled_spans()] == [True, False, True]
    assert [sample.remove_sample for sample in second.samples[0]] == [False, True, False]
    assert second.samples[0][1].loss_mask == [0, 1]  # its own, as slime has it until it trains


@pytest.mark.parametrize(
    "spoil",
    [
        lambda samples: [samples[:2], []],
        lambda samples: change(samples, reward=None, rollout_log_probs=None, status=Sample.Status.ABORTED),
        lambda samples: change(samples, status=Sample.Status.ABORTED),
        lambda samples: change(samples, reward=None, status=Sample.Status.FAILED),
        lambda samples: change(samples, rollout_log_probs=[-1.0], response_length=3, status=Sample.Status.FAILED),
        lambda samples: change(samples, reward={"another": 1.0}),
        lambda samples: change(samples, reward=float("nan")),
        lambda samples: change(samples, tokens=[], response_length=0, rollout_log_probs=None, loss_mask=None),
        lambda samples: change(samples, multimodal_inputs={"images": [object()]}),
        lambda samples: change(samples, multimodal_train_inputs={"pixel_values": object()}),
    ],
    ids=[
        *(
            "a rollout without samples",
            "aborted",
            "aborted with a reward",
            "failed without a reward",
            "failed without log-probabilities",
        ),
        *("another dict", "a reward that is no number", "empty", "an image", "a processed image"),
    ],
)
@pytest.mark.parametrize("rewards", [[0.0, 1.0, 0.0], [1.0, 1.0, 1.0]], ids=["informative", "barren"])
def test_a_group_that_cannot_be_stored_as_it_is_stays_as_it_is(server, spoil, rewards):
    group = spoil(make_samples(1, rewards, key="score"))
    _, second = run(server, [make_samples(0, [0.0, 1.0, 0.0], key="score")], [group], reward_key="score")
    assert second.samples == [group]
    assert second.metrics["replay/groups_left_alone"] == 1
    assert second.metrics["replay/groups_replaced"] == 0
    with ReplayClient(server.address) as client:
        assert len(client.list_items("replay").items) == 1


def change(samples: list[Sample], **fields: object) -> list[Sample]:
    """The samples; the last one has these fields."""
    return [*samples[:-1], dataclasses.replace(samples[-1], **fields)]


def test_long_texts_can_be_stored(server):
    informative = make_samples(0, [0.0, 1.0])
    for sample in informative:
        sample.response = "x" * 3_000_000  # more than the header of a group may have
    _, second = run(server, [informative], [make_samples(7, [1.0, 1.0])])
    assert [sample.response for sample in second.samples[0]] == [sample.response for sample in informative]


def test_slime_goes_on_while_the_server_is_away(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(slime, "GroupPool", functools.partial(slime.GroupPool, timeout=0.2))
    informative, barren = make_samples(0, [0.0, 1.0]), make_samples(7, [1.0, 1.0])
    with server_process(tmp_path) as server:
        run(server, [informative])
        server.kill()
        with caplog.at_level(logging.WARNING, "replay_trainer"):
            _, second = run(server, [informative], [barren])
    assert second.samples == [barren]
    assert second.metrics["replay/unavailable"] == 1.0
    assert second.metrics["replay/groups_missing"] == 1
    assert len([record for record in caplog.records if "is away" in record.msg]) == 1


def test_rollouts_of_several_samples_come_back_with_one_rollout_id_each(server):
    stored = sample_factories.as_agents(make_samples(0, [0.0, 0.0, 1.0]), [2, 1])
    barren = sample_factories.as_agents(make_samples(7, [1.0, 1.0, 1.0]), [1, 2])
    _, second = run(server, [stored], [barren, make_samples(8, [1.0, 0.0])])
    replaced = second.samples[0]
    assert [len(rollout) for rollout in replaced] == [2, 1]
    assert [[told(each) for each in rollout] for rollout in replaced] == [[told(e) for e in r] for r in stored]
    assert [sample.rollout_id for rollout in replaced for sample in rollout] == [900, 900, 901]
    assert [sample.index for rollout in replaced for sample in rollout] == [70, 70, 71]
    validate_rollout_id_annotated(second.samples)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rollout_log_probs": None}, "lack rollout_log_probs"),
        ({"label": object()}, "have a label that cannot be stored, <object object at"),
    ],
)
def test_samples_that_cannot_be_stored_are_refused(server, fields, message):
    with pytest.raises(ValueError, match=message):
        run(server, [make_samples(0, [0.0, 1.0], **fields)])

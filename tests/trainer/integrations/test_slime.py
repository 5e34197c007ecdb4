"""slime's rollout function, with slime's own types where it is installed, and with a copy of their fields elsewhere."""

from __future__ import annotations

import importlib.util
from argparse import Namespace
from collections.abc import Iterator

import pytest

from replay_client import ReplayClient
from replay_server import ReplayServer, TableConfig
from tests.factories import make_group
from tests.trainer.integrations import slime_types

if importlib.util.find_spec("slime") is None:
    slime_types.install()

from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.utils.types import Sample

from replay_trainer.integrations.slime import generate_rollout

POOL = TableConfig(name="replay", sampler="prioritized", remover="min_heap", max_size=64)


@pytest.fixture
def server() -> Iterator[ReplayServer]:
    with ReplayServer([POOL], port=0) as server:
        yield server


def make_samples(group_index: int, rewards: list[float], *, key: str | None = None, **fields: object) -> list[Sample]:
    """One prompt of slime's, whose completions have 1, 2, ... tokens."""
    samples = []
    for k, reward in enumerate(rewards):
        length = k + 1
        prompt = [10 + group_index, 11]
        samples.append(
            Sample(
                **{
                    "group_index": group_index,
                    "index": 10 * group_index + k,
                    "prompt": f"prompt {group_index}",
                    "tokens": [*prompt, *range(20 + group_index, 20 + group_index + length)],
                    "response": f"response {group_index}/{k}",
                    "response_length": length,
                    "label": f"label {group_index}",
                    "reward": reward if key is None else {key: reward, "other": 5.0},
                    "loss_mask": [0] * (length > 1) + [1] * (length - (length > 1)),
                    "rollout_log_probs": [-0.25 * (group_index + 1)] * length,
                    "weight_versions": [f"w{group_index}"],
                    "status": Sample.Status.TRUNCATED if k else Sample.Status.COMPLETED,
                    "metadata": {"of": group_index},
                    **fields,
                }
            )
        )
    return samples


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


@pytest.mark.parametrize("key", [None, "score"])
def test_a_group_without_variance_becomes_a_stored_one_in_its_place(server: ReplayServer, key: str | None) -> None:
    informative, barren = make_samples(0, [0.0, 1.0, 0.0], key=key), make_samples(7, [1.0, 1.0, 1.0], key=key)
    fresh = make_samples(8, [1.0, 0.0, 1.0], key=key)
    first, second = run(server, [informative], [fresh, barren], reward_key=key)
    assert first.samples == [informative]
    assert second.samples[0] == fresh
    for sample, source, place in zip(second.samples[1], informative, barren, strict=True):
        names = ("prompt", "tokens", "response", "response_length", "label", "reward", "loss_mask", "weight_versions")
        assert {name: getattr(sample, name) for name in names} == {name: getattr(source, name) for name in names}
        assert sample.rollout_log_probs == pytest.approx(source.rollout_log_probs)
        assert sample.status is source.status
        # slime groups and orders by these.
        assert (sample.group_index, sample.index, sample.metadata) == (place.group_index, place.index, place.metadata)
    assert second.metrics["own"] == 1.0
    assert second.metrics["replay/groups_replaced"] == 1
    assert second.metrics["replay/fresh_zero_variance"] == 0.5
    assert second.metrics["replay/staleness"] == 1.0


def test_informative_groups_are_stored_with_their_version(server: ReplayServer) -> None:
    run(server, [make_samples(0, [0.0, 1.0])], [make_samples(1, [1.0, 0.0]), make_samples(2, [0.0, 0.0])])
    with ReplayClient(server.address) as client:
        items = client.list_items("replay", order_by="age", descending=True).items
        groups = [item.group for item in client.get([item.key for item in items])]
        assert client.policy().version == 1
    assert [group.rewards.tolist() for group in groups] == [[0.0, 1.0], [1.0, 0.0]]
    assert [group.policy_version for group in groups] == [0, 1]
    assert groups[0].loss_mask.tolist() == [True, False, True]


def test_groups_of_other_sizes_and_of_other_writers_are_not_used(server: ReplayServer) -> None:
    with ReplayClient(server.address) as client:
        client.insert(make_group(lengths=(1, 2), rewards=(0.0, 1.0)), {"replay": 1.0})
    barren = make_samples(3, [1.0, 1.0])
    _, output = run(server, [make_samples(0, [0.0, 1.0, 1.0])], [barren])
    assert output.samples == [barren]
    assert output.metrics["replay/groups_missing"] == 1


def test_evaluation_is_slimes_own() -> None:
    args = Namespace(replay_rollout_function=f"{__name__}.planned_rollout", replay_address="127.0.0.1:1")
    assert generate_rollout(args, 0, None, evaluation=True) == RolloutFnEvalOutput(data={"set": {}})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rollout_log_probs": None}, "lack rollout_log_probs"),
        ({"teacher_log_probs": [0.0]}, "have teacher_log_probs, which stored groups do not have"),
    ],
)
def test_samples_that_cannot_be_stored_are_refused(
    server: ReplayServer, fields: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run(server, [make_samples(0, [0.0, 1.0], **fields)])

"""Rollouts of several turns: what the hook plays is what the group holds, and a rollout that fails fails alone."""

import asyncio
import gc
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from replay_client.columns import RAGGED
from replay_client.sampling_masks import SAMPLING_MASK, mask_column
from replay_generator import (
    GeneratorConfig,
    PromptError,
    Rollout,
    RolloutError,
    RolloutGenerator,
    RolloutPolicy,
    RolloutSequence,
    Task,
)
from replay_generator.engines import Completion, EngineError, SamplingConfig
from replay_generator.engines.transformers import TransformersEngine
from replay_generator.rewards.functions import group_reward
from replay_generator.rollouts.environments import load_environment
from replay_generator.testing import ScriptedEngine
from replay_server import TableConfig
from tests.kit.clients import RecordingClient
from tests.kit.clocks import stopped_clock
from tests.kit.engines import SAID
from tests.kit.generators import generate, make_prompts, played, zero
from tests.kit.models import EXACT, recomputed
from tests.kit.servers import async_serving

pytestmark = pytest.mark.filterwarnings("error:coroutine:RuntimeWarning")


SPOKEN = RolloutSequence([1])
SPOKEN.append_completion(SAID)


async def two_turns(task: Task, policy: RolloutPolicy) -> Rollout:
    """The policy writes, a tool answers with the tokens 9 and 5, and the policy writes again."""
    sequence = RolloutSequence(task.prompt_ids)
    first = sequence.append_completion(await policy.generate(sequence.token_ids))
    sequence.append_observation([9, 5], text=f"{first.text}?")
    sequence.append_completion(await policy.generate(sequence.token_ids))
    return Rollout([sequence], info={"index": task.index})


async def with_sub_agent(task: Task, policy: RolloutPolicy) -> Rollout:
    """A second agent knows the tokens 20 and 21 from elsewhere."""
    main = RolloutSequence(task.prompt_ids)
    main.append_completion(await policy.generate(main.token_ids))
    helper = RolloutSequence([*task.prompt_ids, 20, 21])
    helper.append_completion(await policy.generate(helper.token_ids))
    return Rollout([main, helper], reward=float(task.index))


# ------------------------------------------------------------------------------------------- what a group holds


async def test_every_sampled_token_has_the_logprob_of_all_tokens_before_it_and_a_tools_have_none(model):
    sampling = SamplingConfig(temperature=0.8, max_tokens=8)
    async with async_serving([TableConfig(name="rollouts")]) as client:
        engine = TransformersEngine(model, seed=0)
        await generate(client, engine, two_turns, sampling=sampling, prompts=["12+3="])
        ((sample,),) = [await client.sample("rollouts")]
    group = sample.group
    assert group.prompt_ids.tolist() == engine.tokenizer.encode("12+3=")
    assert group.group_size == 4
    assert group.num_sequences == 4
    assert group.context_lengths is None
    for span, ids in zip(group.sequence_spans(), group.completions(), strict=True):
        trained, logprobs = group.trained_mask[span], group.rollout_logprobs[span]
        (tool,) = [at for at in range(ids.size - 1) if not trained[at : at + 2].any()]
        assert ids[tool : tool + 2].tolist() == [9, 5]
        assert trained.sum() == ids.size - 2
        assert np.isnan(logprobs[tool : tool + 2]).all()
        expected = np.array(recomputed(model, group.prompt_ids.tolist(), ids.tolist(), sampling))
        np.testing.assert_allclose(logprobs[trained], expected[trained], atol=EXACT)
    assert group.meta["turns"][0][2] == ["tool", 2]


async def test_a_single_turn_makes_the_group_that_it_made_without_a_hook():
    async def hook(task: Task, policy: RolloutPolicy) -> Rollout:
        sequence = RolloutSequence(task.prompt_ids)
        sequence.append_completion(await policy.generate(sequence.token_ids))
        return Rollout([sequence])

    client = RecordingClient()
    generator = RolloutGenerator(
        client,  # type: ignore[arg-type]
        ScriptedEngine(),
        make_prompts(),
        zero,
        GeneratorConfig(group_size=3, max_groups=1),
    )
    await generator.run()
    assert await played(hook, ScriptedEngine(), group_size=3) == client.inserts[0][0]
    assert client.inserts[0][0].loss_mask is client.inserts[0][0].sequence_counts is None
    assert client.inserts[0][0].meta == {}


async def test_a_rollout_of_several_sequences_counts_once_and_shares_what_they_begin_with():
    group = await played(with_sub_agent, reward=None, group_size=2)
    prompt_ids = group.prompt_ids.tolist()
    assert group.group_size == 2
    assert group.num_sequences == 4
    assert group.sequence_counts is not None
    assert group.sequence_counts.tolist() == [2, 2]
    assert group.context_lengths is not None
    assert group.context_lengths.tolist() == [0, 2, 0, 2]
    assert [ids.tolist() for ids in group.prompts()] == [prompt_ids, [*prompt_ids, 20, 21]] * 2
    assert [ids.tolist() for ids in group.completions()] == [[7, 8], [20, 21, 7, 8]] * 2
    assert group.rewards.tolist() == [0.0, 1.0]


async def test_a_token_of_agents_whose_logprob_the_engine_does_not_know_is_masked_and_counted():
    client = RecordingClient()
    half, none = ([7, 8], [np.nan, -0.2], "78", "stop", []), ([7], [np.nan], "7", "stop", [])
    engine = ScriptedEngine(completions=[Completion(*half)])
    stats = await generate(client, engine, with_sub_agent, reward=None, group_size=2)
    (group, _), *_ = client.inserts
    assert group.completion_ids[group.trained_mask].tolist() == [8] * 4
    assert group.meta["unknown_logprobs"] == 4
    assert stats["nan_logprobs"] == 4
    group = await played(with_sub_agent, ScriptedEngine(completions=[Completion(*none)]), reward=None, group_size=2)
    assert group.completion_ids[group.trained_mask].tolist() == [7] * 4


async def test_masks_and_extras_of_a_completion_stand_at_its_tokens():
    alternatives = np.array([[1, 2, 3], [4, 5, 6]], np.int16)
    engine = ScriptedEngine(
        completions=[Completion([7, 8], [-0.1, float("nan")], "78", "stop", [], [True, False], {"top": alternatives})]
    )
    group = await played(two_turns, engine, group_size=2)
    turn, tool = alternatives.tolist(), [[0, 0, 0]] * 2
    assert group.extras["top"].tolist() == [*turn, *tool, *turn] * 2
    assert group.axes == {"top": "token"}
    assert group.trained_mask.tolist() == [True, False, False, False, True, False] * 2


async def test_sets_of_tokens_and_rows_of_what_the_engine_has_read_stand_at_their_tokens():
    class Reader(ScriptedEngine):
        """Tells a row for each token that it has read: the token itself."""

        async def generate(
            self, prompt_ids: Sequence[int], sampling: SamplingConfig, n: int, *_: Any
        ) -> list[Completion]:
            drawn = await super().generate(prompt_ids, sampling, n)
            return [
                replace(
                    each,
                    extras=mask_column([[7, 9], []]) | {"read": np.array([[*prompt_ids, *each.token_ids[:-1]]]).T},
                    axes={SAMPLING_MASK: RAGGED, "read": "whole"},
                )
                for each in drawn
            ]

    engine = Reader(completions=[Completion([7, 8], [-0.1, -0.2], "78", "stop", [])])
    for hook in (two_turns, with_sub_agent):
        group = await played(hook, engine, group_size=2, reward=None if hook is with_sub_agent else zero)
        assert group.axes == {SAMPLING_MASK: RAGGED, "read": "whole"}
        read = group.extras["read"][:, 0]
        assert read[: group.prompt_ids.size].tolist() == group.prompt_ids.tolist()
        for sequence, (ids, sampled) in enumerate(zip(group.completions(), group.sampled_spans(), strict=True)):
            # The last token of a sequence is drawn, and not read.
            rows = group.extra_of("read", sequence)[group.prompt_ids.size :, 0]
            assert rows.tolist() == [*ids[:-1].tolist(), 0]
            offsets, kept = group.offsets_of(SAMPLING_MASK, sequence), group.extra_of(SAMPLING_MASK, sequence)
            drawn = [kept[a:b].tolist() for a, b in pairwise(offsets)][-sampled.stop + sampled.start :]
            trained = group.trained_mask[sampled].tolist()
            expected = iter([[7, 9], []] * sum(trained))
            assert drawn == [next(expected) if mine else [] for mine in trained]


async def test_tokens_of_a_tool_have_the_version_of_the_token_before_them():
    class NewWeightsEachTime(ScriptedEngine):
        async def generate(self, *request: Any) -> list[Completion]:
            self.version += 1
            return await super().generate(*request)

    group = await played(two_turns, NewWeightsEachTime(completions=[SAID]), group_size=1)
    assert group.policy_version == 1
    assert group.policy_version_end == 2
    assert group.extras["policy_versions"].tolist() == [1, 1, 1, 1, 2, 2]
    assert group.axes["policy_versions"] == "token"


async def test_rollouts_that_ask_for_the_same_at_the_same_moment_share_one_request():
    engine = ScriptedEngine(completions=[SAID, Completion([6], [-0.3], "6", "stop", [])])
    await played(two_turns, engine, group_size=4, sampling=SamplingConfig(seed=3))
    # One for all first turns, and one for each of the two ways in which they went on, each with a seed of its own.
    assert len(engine.seeds) == 3
    assert len(set(engine.seeds)) == 3


async def test_a_rollout_goes_on_while_the_first_turns_of_others_are_still_drawn():
    class OneAtATime(ScriptedEngine):
        """Ends the first of several completions, and the others when that one's rollout has asked again."""

        asked_again = asyncio.Event()

        async def generate(
            self, prompt_ids: Sequence[int], sampling: SamplingConfig, n: int, finished: Any = None
        ) -> list[Completion]:
            drawn = await super().generate(prompt_ids, sampling, n)
            if n > 1:
                finished(0, drawn[0])
                await asyncio.wait_for(self.asked_again.wait(), 30)
            else:
                self.asked_again.set()
            return drawn

    group = await played(two_turns, OneAtATime(completions=[SAID]), group_size=3)
    assert group.group_size == 3


# ------------------------------------------------------------------------------------------- rollouts that fail


async def fails_at_odd(task: Task, policy: RolloutPolicy) -> Rollout:
    if task.index % 2:
        raise OSError(f"the browser of {task.index} is gone")
    return await two_turns(task, policy)


async def test_the_others_make_the_group_if_they_are_enough():
    client = RecordingClient(admission=True)

    def reward(row: Any, text: str, rollout: Rollout) -> float:
        return float(rollout.info["index"])

    engine = ScriptedEngine(completions=[SAID])
    stats = await generate(client, engine, fails_at_odd, reward=reward, min_rollouts=2)
    group = client.inserts[0][0]
    assert group.rewards.tolist() == [0.0, 2.0]
    np.testing.assert_allclose(group.advantages, np.array([-1, 1]) / (np.sqrt(2) + 1e-4), rtol=1e-6)
    assert stats["groups"] == 1
    assert stats["rollouts_failed"] == 2
    assert stats["groups_skipped"] == 0


async def test_a_group_with_too_few_is_left_out_and_its_permit_goes_back():
    client = RecordingClient(admission=True)
    engine = ScriptedEngine(completions=[SAID])
    stats = await generate(client, engine, fails_at_odd, max_groups=3, on_prompt_error="skip", min_rollouts=3)
    assert client.inserts == []
    assert client.leases == []
    assert stats["groups_skipped"] == 3
    assert stats["rollouts_failed"] == 6


@pytest.mark.parametrize(
    ("hook", "says"),
    [
        (fails_at_odd, r"'p0': 2 of 4 rollouts failed, the first with OSError\('the browser of 1 is gone'\).* is 4"),
        ("text", "the hook returned 'text', not a Rollout: return Rollout"),
        (Rollout([]), "the hook returned a rollout without sequences"),
        (Rollout([[1, 2]]), r"the hook returned a rollout of \[1, 2\], which is no RolloutSequence"),
        (Rollout([SPOKEN, SPOKEN]), "the hook returned one sequence twice: make a RolloutSequence for each"),
        (Rollout([RolloutSequence([1])]), "the policy wrote nothing in the rollout: add what policy.generate returns"),
    ],
)
async def test_without_a_least_number_one_failure_fails_the_group_and_says_why(hook, says):
    async def returns(task: Task, policy: RolloutPolicy) -> Any:
        return hook

    with pytest.raises(PromptError, match=says):
        await played(hook if callable(hook) else returns)


async def test_what_a_hook_raises_is_told_with_its_line():
    async def broken(task: Task, policy: RolloutPolicy) -> Rollout:
        return {}["browser"]

    line = broken.__code__.co_firstlineno + 1
    with pytest.raises(
        PromptError, match=rf"KeyError\('browser'\) \({re.escape(__file__)}, line {line}\); min_rollouts"
    ):
        await played(broken)


async def test_a_hook_that_is_not_async_fails_with_the_remedy():
    with pytest.raises(PromptError, match=r"the hook returned Rollout.* without being awaited: write async def"):
        await played(lambda task, policy: Rollout([SPOKEN]))


async def test_a_text_in_the_place_of_tokens_fails_the_rollout_that_gave_it():
    async def careless(task: Task, policy: RolloutPolicy) -> Rollout:
        sequence = RolloutSequence(task.prompt_ids)
        sequence.append_observation("no" if task.index == 0 else np.array([9, 5]))
        sequence.append_completion(await policy.generate(sequence.token_ids))
        return Rollout([sequence])

    assert (await played(careless, min_rollouts=3)).group_size == 3
    with pytest.raises(PromptError, match=r"tokens are integers, not .no.: a text goes through task.tokenizer.encode"):
        await played(careless)


async def test_a_rollout_that_takes_too_long_fails():
    finished: list[int] = []
    all_others = asyncio.Event()

    async def hangs(task: Task, policy: RolloutPolicy) -> Rollout:
        if task.index == 0:
            await all_others.wait()
            go_on(1.0)
            await asyncio.Event().wait()
        rollout = await two_turns(task, policy)
        finished.append(task.index)
        if len(finished) == 3:
            all_others.set()
        return rollout

    with stopped_clock() as go_on:
        group = await played(hangs, rollout_timeout=0.5, min_rollouts=1)
    assert group.group_size == 3
    assert sorted(finished) == [1, 2, 3]


async def test_a_rollout_that_outgrows_the_engine_fails_alone():
    async def endless(task: Task, policy: RolloutPolicy) -> Rollout:
        sequence = RolloutSequence(task.prompt_ids)
        while task.index == 0:
            sequence.append_completion(await policy.generate(sequence.token_ids))
        sequence.append_completion(await policy.generate(sequence.token_ids))
        return Rollout([sequence])

    assert (await played(endless, min_rollouts=3)).group_size == 3
    with pytest.raises(PromptError, match="asked to go on after 64 tokens; the engine takes 1 to 63"):
        await played(endless)


@pytest.mark.parametrize("token", [-1, 10**6])
async def test_a_rollout_with_a_token_that_no_model_has_fails_alone(model, token):
    async def wrong_at_0(task: Task, policy: RolloutPolicy) -> Rollout:
        sequence = RolloutSequence(task.prompt_ids)
        sequence.append_completion(await policy.generate(sequence.token_ids))
        sequence.append_observation([5 if task.index else token])
        sequence.append_completion(await policy.generate(sequence.token_ids))
        return Rollout([sequence])

    sampling = SamplingConfig(max_tokens=4)
    engine = TransformersEngine(model, seed=0)
    group = await played(wrong_at_0, engine, prompts=["12+3="], min_rollouts=3, sampling=sampling)
    assert group.group_size == 3
    with pytest.raises(
        PromptError, match=f"asked to go on after the token {token}, and (the model has the|tokens are) "
    ):
        await played(wrong_at_0, TransformersEngine(model, seed=0), prompts=["12+3="], sampling=sampling)


async def test_an_engine_that_dies_ends_the_run_once_whatever_the_hook_catches(caplog):
    class Dying(ScriptedEngine):
        async def generate(self, *_: Any) -> list[Completion]:
            raise EngineError("the engine is dead")

    async def careless(task: Task, policy: RolloutPolicy) -> Rollout:
        try:
            return await two_turns(task, policy)
        except Exception as error:
            raise RuntimeError("something went wrong") from error

    with pytest.raises(EngineError, match="the engine is dead"):
        await played(careless, Dying(), min_rollouts=1)
    gc.collect()
    assert "never retrieved" not in caplog.text  # the errors of the other rollouts


# ------------------------------------------------------------------------------------------- rewards


async def test_rewards_see_the_turns_the_texts_and_what_the_hook_tells():
    @group_reward
    def of_group(row: Any, texts: list[str], rollouts: list[Rollout]) -> list[float]:
        assert texts == ["78"] * 4
        return [len(each.turns) + each.info["index"] for each in rollouts]

    def of_one(row: Any, text: str, rollout: Rollout) -> float:
        return float([turn.text for turn in rollout.turns if turn.role == "tool"] == ["78?"])

    group = await played(two_turns, reward=[of_group, of_one])
    assert group.rewards.tolist() == [5.0, 6.0, 7.0, 8.0]
    assert group.extras["rewards/of_one"].tolist() == [1.0] * 4
    assert group.axes["rewards/of_one"] == "rollout"


async def test_the_reward_of_the_environment_is_added_to_those_of_functions():
    async def rewarded(task: Task, policy: RolloutPolicy) -> Rollout:
        rollout = await two_turns(task, policy)
        rollout.reward = task.index / 2
        return rollout

    assert (await played(rewarded, reward=None)).rewards.tolist() == [0.0, 0.5, 1.0, 1.5]
    group = await played(rewarded, reward=lambda row, text: 2.0)
    assert group.rewards.tolist() == [2.0, 2.5, 3.0, 3.5]
    assert group.extras["rewards/rollout"].tolist() == [0.0, 0.5, 1.0, 1.5]


async def test_rollouts_without_any_reward_are_refused_with_the_remedy():
    with pytest.raises(PromptError, match="4 of 4 rollouts have no reward: the hook returns Rollout"):
        await played(two_turns, reward=None)


# ------------------------------------------------------------------------------------------------ environments


@dataclass
class Browser:
    """A hook that needs to be open. `fails`: it cannot be opened."""

    fails: bool = False
    open: bool = False
    opened: int = 0

    async def __aenter__(self) -> None:
        if self.fails:
            raise RolloutError("no browser is installed")
        self.open, self.opened = True, self.opened + 1

    async def __aexit__(self, *_: object) -> None:
        self.open = False

    async def __call__(self, task: Task, policy: RolloutPolicy) -> Rollout:
        assert self.open
        rollout = await with_sub_agent(task, policy)
        rollout.metrics = {"clicks": float(task.index), f"page-{task.index}": 1.0}
        return rollout


async def test_a_hook_that_is_a_context_is_open_while_rollouts_are_played():
    browser = Browser()
    await generate(RecordingClient(), ScriptedEngine(completions=[SAID]), browser, reward=None, max_groups=3)
    assert browser.opened == 1
    assert not browser.open


async def test_a_hook_that_cannot_be_opened_ends_the_run_and_closes_the_engine():
    engine = ScriptedEngine(completions=[SAID])
    with pytest.raises(RolloutError, match="no browser is installed"):
        await generate(RecordingClient(), engine, Browser(fails=True))
    assert engine.closed == 1


async def test_metrics_that_all_rollouts_have_are_stored_and_do_not_count_in_the_reward(tmp_path):
    client, path = RecordingClient(), tmp_path / "metrics.jsonl"
    engine = ScriptedEngine(completions=[SAID])
    await generate(client, engine, Browser(), reward=None, group_size=2, max_groups=2, metrics_path=path)
    for group, _ in client.inserts:
        assert group.rewards.tolist() == [0.0, 1.0]
        assert group.extras["rewards/rollout/clicks"].tolist() == [0.0, 1.0]
        assert group.axes["rewards/rollout/clicks"] == "rollout"
        assert not any("page" in name for name in group.extras)
    assert '"reward/rollout/clicks": 0.5' in path.read_text()


@pytest.mark.parametrize(
    ("source", "args", "words"),
    [
        ("gym:cartpole", None, "environment must be verifiers:NAME, not 'gym:cartpole'"),
        ("verifiers", None, "environment must be verifiers:NAME, not 'verifiers'"),
        ("verifiers:sums", "{", r"environment_args must be a JSON object, not '\{'"),
        ("verifiers:sums", "[3]", r"environment_args must be a JSON object, like .*, not \[3\]"),
    ],
    ids=["package", "name", "json", "object"],
)
def test_an_environment_is_named_by_its_package_and_has_an_object_of_arguments(source, args, words):
    with pytest.raises(ValueError, match=words):
        load_environment(source, args)


def test_models_that_are_not_trained_need_a_hook_of_agents():
    config = GeneratorConfig(untrained_models=("titles",))
    with pytest.raises(ValueError, match="untrained_models needs --agent or --sessions"):
        RolloutGenerator(RecordingClient(), ScriptedEngine(), [], config=config)

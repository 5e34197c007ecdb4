"""Rollouts of several turns: what the hook plays is what the group holds, and a rollout that fails fails alone."""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from replay_client import AsyncReplayClient, RolloutGroup
from replay_client.generator import (
    GeneratorConfig,
    PromptError,
    Rollout,
    RolloutError,
    RolloutGenerator,
    RolloutPolicy,
    RolloutSequence,
    Task,
)
from replay_client.generator.engines import Completion, EngineError, SamplingConfig
from replay_client.generator.engines.transformers import TransformersEngine
from replay_client.generator.environments import load_environment
from replay_client.generator.rewards import group_reward
from replay_client.generator.tool_loop import ToolCall, json_calls, tool_loop
from replay_server import ReplayServer, TableConfig
from tests.client.generator.factories import EOS, RecordingClient, ScriptedEngine, make_prompts, recomputed

pytestmark = pytest.mark.filterwarnings("error:coroutine:RuntimeWarning")

SAID = Completion([7, 8], [-0.1, -0.2], "78", "stop", [])


SPOKEN = RolloutSequence([1])
SPOKEN.sampled(SAID)


async def two_turns(task: Task, policy: RolloutPolicy) -> Rollout:
    """The policy writes, a tool answers with the tokens 9 and 5, and the policy writes again."""
    sequence = RolloutSequence(task.prompt_ids)
    first = sequence.sampled(await policy.generate(sequence.token_ids))
    sequence.given([9, 5], text=f"{first.text}?")
    sequence.sampled(await policy.generate(sequence.token_ids))
    return Rollout([sequence], info={"index": task.index})


def zero(row: Any, text: str) -> float:
    return 0.0


async def with_sub_agent(task: Task, policy: RolloutPolicy) -> Rollout:
    """A second agent knows the tokens 20 and 21 from elsewhere."""
    main = RolloutSequence(task.prompt_ids)
    main.sampled(await policy.generate(main.token_ids))
    helper = RolloutSequence([*task.prompt_ids, 20, 21])
    helper.sampled(await policy.generate(helper.token_ids))
    return Rollout([main, helper], reward=float(task.index))


async def generate(
    client: Any, engine: Any, hook: Any, *, reward: Any = zero, prompts: Any = None, **config: Any
) -> Any:
    config = {"group_size": 4, "max_groups": 1, "max_concurrent_groups": 1} | config
    prompts = make_prompts() if prompts is None else prompts
    generator = RolloutGenerator(client, engine, prompts, reward, GeneratorConfig(**config), rollout=hook)
    await generator.run()
    return generator.stats


async def played(hook: Any, engine: Any = None, **config: Any) -> RolloutGroup:
    """The group that a hook makes of one prompt."""
    client = RecordingClient()
    await generate(client, ScriptedEngine(completions=[SAID]) if engine is None else engine, hook, **config)
    return client.inserts[0][0]


# ------------------------------------------------------------------------------------------- what a group holds


async def test_every_sampled_token_has_the_logprob_of_all_tokens_before_it_and_a_tools_have_none(model: Path) -> None:
    sampling = SamplingConfig(temperature=0.8, max_tokens=8)
    with ReplayServer(tables=[TableConfig(name="rollouts")], port=0) as server:
        async with AsyncReplayClient(server.address) as client:
            engine = TransformersEngine(model, seed=0)
            await generate(client, engine, two_turns, sampling=sampling, prompts=["12+3="])
            ((sample,),) = [await client.sample("rollouts")]
    group = sample.group
    assert group.prompt_ids.tolist() == engine.tokenizer.encode("12+3=")
    assert group.group_size == group.num_sequences == 4
    assert group.context_lengths is None
    for span, ids in zip(group.sequence_spans(), group.completions(), strict=True):
        trained, logprobs = group.trained_mask[span], group.rollout_logprobs[span]
        (tool,) = [at for at in range(ids.size - 1) if not trained[at : at + 2].any()]
        assert ids[tool : tool + 2].tolist() == [9, 5]
        assert trained.sum() == ids.size - 2
        assert np.isnan(logprobs[tool : tool + 2]).all()
        expected = np.array(recomputed(model, group.prompt_ids.tolist(), ids.tolist(), sampling))
        np.testing.assert_allclose(logprobs[trained], expected[trained], atol=1e-5)
    assert group.meta["turns"][0][2] == ["tool", 2]


async def test_a_single_turn_makes_the_group_that_it_made_without_a_hook() -> None:
    async def hook(task: Task, policy: RolloutPolicy) -> Rollout:
        sequence = RolloutSequence(task.prompt_ids)
        sequence.sampled(await policy.generate(sequence.token_ids))
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


async def test_a_rollout_of_several_sequences_counts_once_and_shares_what_they_begin_with() -> None:
    group = await played(with_sub_agent, reward=None, group_size=2)
    prompt_ids = group.prompt_ids.tolist()
    assert (group.group_size, group.num_sequences) == (2, 4)
    assert group.sequence_counts is not None
    assert group.sequence_counts.tolist() == [2, 2]
    assert group.context_lengths is not None
    assert group.context_lengths.tolist() == [0, 2, 0, 2]
    assert [ids.tolist() for ids in group.prompts()] == [prompt_ids, [*prompt_ids, 20, 21]] * 2
    assert [ids.tolist() for ids in group.completions()] == [[7, 8], [20, 21, 7, 8]] * 2
    assert group.rewards.tolist() == [0.0, 1.0]


async def test_a_token_of_agents_whose_logprob_the_engine_does_not_know_is_masked_and_counted() -> None:
    client = RecordingClient()
    half, none = ([7, 8], [np.nan, -0.2], "78", "stop", []), ([7], [np.nan], "7", "stop", [])
    engine = ScriptedEngine(completions=[Completion(*half)])
    stats = await generate(client, engine, with_sub_agent, reward=None, group_size=2)
    (group, _), *_ = client.inserts
    assert group.completion_ids[group.trained_mask].tolist() == [8] * 4
    assert group.meta["unknown_logprobs"] == stats["nan_logprobs"] == 4
    group = await played(with_sub_agent, ScriptedEngine(completions=[Completion(*none)]), reward=None, group_size=2)
    assert group.completion_ids[group.trained_mask].tolist() == [7] * 4


async def test_masks_and_extras_of_a_completion_stand_at_its_tokens() -> None:
    alternatives = np.array([[1, 2, 3], [4, 5, 6]], np.int16)
    engine = ScriptedEngine(
        completions=[Completion([7, 8], [-0.1, float("nan")], "78", "stop", [], [True, False], {"top": alternatives})]
    )
    group = await played(two_turns, engine, group_size=2)
    turn, tool = alternatives.tolist(), [[0, 0, 0]] * 2
    assert group.extras["top"].tolist() == [*turn, *tool, *turn] * 2
    assert group.axes == {"top": "token"}
    assert group.trained_mask.tolist() == [True, False, False, False, True, False] * 2


async def test_tokens_of_a_tool_have_the_version_of_the_token_before_them() -> None:
    class NewWeightsEachTime(ScriptedEngine):
        async def generate(self, prompt_ids: Sequence[int], sampling: SamplingConfig, n: int) -> list[Completion]:
            self.version += 1
            return await super().generate(prompt_ids, sampling, n)

    group = await played(two_turns, NewWeightsEachTime(completions=[SAID]), group_size=1)
    assert (group.policy_version, group.policy_version_end) == (1, 2)
    assert group.extras["policy_versions"].tolist() == [1, 1, 1, 1, 2, 2]
    assert group.axes["policy_versions"] == "token"


async def test_rollouts_that_ask_for_the_same_at_the_same_moment_share_one_request() -> None:
    engine = ScriptedEngine(completions=[SAID, Completion([6], [-0.3], "6", "stop", [])])
    await played(two_turns, engine, group_size=4, sampling=SamplingConfig(seed=3))
    # One for all first turns, and one for each of the two ways in which they went on, each with a seed of its own.
    assert len(engine.seeds) == len(set(engine.seeds)) == 3


# ------------------------------------------------------------------------------------------- rollouts that fail


async def fails_at_odd(task: Task, policy: RolloutPolicy) -> Rollout:
    if task.index % 2:
        raise OSError(f"the browser of {task.index} is gone")
    return await two_turns(task, policy)


async def test_the_others_make_the_group_if_they_are_enough() -> None:
    client = RecordingClient(admission=True)

    def reward(row: Any, text: str, rollout: Rollout) -> float:
        return float(rollout.info["index"])

    engine = ScriptedEngine(completions=[SAID])
    stats = await generate(client, engine, fails_at_odd, reward=reward, min_rollouts=2)
    group = client.inserts[0][0]
    assert group.rewards.tolist() == [0.0, 2.0]
    np.testing.assert_allclose(group.advantages, np.array([-1, 1]) / (np.sqrt(2) + 1e-4), rtol=1e-6)
    assert (stats["groups"], stats["rollouts_failed"], stats["skipped"]) == (1, 2, 0)


async def test_a_group_with_too_few_is_left_out_and_its_permit_goes_back() -> None:
    client = RecordingClient(admission=True)
    engine = ScriptedEngine(completions=[SAID])
    stats = await generate(client, engine, fails_at_odd, max_groups=3, on_prompt_error="skip", min_rollouts=3)
    assert (client.inserts, client.leases) == ([], [])
    assert (stats["skipped"], stats["rollouts_failed"]) == (3, 6)


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
async def test_without_a_least_number_one_failure_fails_the_group_and_says_why(hook: Any, says: str) -> None:
    async def returns(task: Task, policy: RolloutPolicy) -> Any:
        return hook

    with pytest.raises(PromptError, match=says):
        await played(hook if callable(hook) else returns)


async def test_what_a_hook_raises_is_told_with_its_line() -> None:
    async def broken(task: Task, policy: RolloutPolicy) -> Rollout:
        return {}["browser"]

    line = broken.__code__.co_firstlineno + 1
    with pytest.raises(
        PromptError, match=rf"KeyError\('browser'\) \({re.escape(__file__)}, line {line}\); min_rollouts"
    ):
        await played(broken)


async def test_a_hook_that_is_not_async_fails_with_the_remedy() -> None:
    with pytest.raises(PromptError, match=r"the hook returned Rollout.* without being awaited: write async def"):
        await played(lambda task, policy: Rollout([SPOKEN]))


async def test_a_text_in_the_place_of_tokens_fails_the_rollout_that_gave_it() -> None:
    async def careless(task: Task, policy: RolloutPolicy) -> Rollout:
        sequence = RolloutSequence(task.prompt_ids)
        sequence.given("no" if task.index == 0 else np.array([9, 5]))
        sequence.sampled(await policy.generate(sequence.token_ids))
        return Rollout([sequence])

    assert (await played(careless, min_rollouts=3)).group_size == 3
    with pytest.raises(PromptError, match=r"tokens are integers, not .no.: a text goes through task.tokenizer.encode"):
        await played(careless)


async def test_a_rollout_that_takes_too_long_fails() -> None:
    async def hangs(task: Task, policy: RolloutPolicy) -> Rollout:
        if task.index == 0:
            await asyncio.Event().wait()
        return await two_turns(task, policy)

    group = await played(hangs, rollout_timeout=0.5, min_rollouts=1)
    assert group.group_size == 3


async def test_a_rollout_that_outgrows_the_engine_fails_alone() -> None:
    async def endless(task: Task, policy: RolloutPolicy) -> Rollout:
        sequence = RolloutSequence(task.prompt_ids)
        while task.index == 0:
            sequence.sampled(await policy.generate(sequence.token_ids))
        sequence.sampled(await policy.generate(sequence.token_ids))
        return Rollout([sequence])

    assert (await played(endless, min_rollouts=3)).group_size == 3
    with pytest.raises(PromptError, match="asked to go on after 64 tokens; the engine takes 1 to 63"):
        await played(endless)


@pytest.mark.parametrize("token", [-1, 10**6])
async def test_a_rollout_with_a_token_that_no_model_has_fails_alone(model: Path, token: int) -> None:
    async def wrong_at_0(task: Task, policy: RolloutPolicy) -> Rollout:
        sequence = RolloutSequence(task.prompt_ids)
        sequence.sampled(await policy.generate(sequence.token_ids))
        sequence.given([5 if task.index else token])
        sequence.sampled(await policy.generate(sequence.token_ids))
        return Rollout([sequence])

    sampling = SamplingConfig(max_tokens=4)
    engine = TransformersEngine(model, seed=0)
    group = await played(wrong_at_0, engine, prompts=["12+3="], min_rollouts=3, sampling=sampling)
    assert group.group_size == 3
    with pytest.raises(
        PromptError, match=f"asked to go on after the token {token}, and its tokenizer has the tokens 0"
    ):
        await played(wrong_at_0, TransformersEngine(model, seed=0), prompts=["12+3="], sampling=sampling)


async def test_an_engine_that_dies_ends_the_run_whatever_the_hook_catches() -> None:
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


# ------------------------------------------------------------------------------------------- rewards


async def test_rewards_see_the_turns_the_texts_and_what_the_hook_tells() -> None:
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


async def test_the_reward_of_the_environment_is_added_to_those_of_functions() -> None:
    async def rewarded(task: Task, policy: RolloutPolicy) -> Rollout:
        rollout = await two_turns(task, policy)
        rollout.reward = task.index / 2
        return rollout

    assert (await played(rewarded, reward=None)).rewards.tolist() == [0.0, 0.5, 1.0, 1.5]
    group = await played(rewarded, reward=lambda row, text: 2.0)
    assert group.rewards.tolist() == [2.0, 2.5, 3.0, 3.5]
    assert group.extras["rewards/rollout"].tolist() == [0.0, 0.5, 1.0, 1.5]


async def test_rollouts_without_any_reward_are_refused_with_the_remedy() -> None:
    with pytest.raises(PromptError, match="4 of 4 rollouts have no reward: the hook returns Rollout"):
        await played(two_turns, reward=None)


# ------------------------------------------------------------------------------------------- the tool loop

TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}\n{{ message['content'] }}<e>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
FORGETS = TEMPLATE.replace("{{ message['content'] }}", "{{ message['content'] if loop.last else '' }}")


def chat_tokenizer(template: str = TEMPLATE) -> Any:
    """A token for each character, and one each for the marks of turns."""
    vocabulary = {"<pad>": 0, "<e>": EOS, "<s>": 2} | {
        chr(code): at for at, code in enumerate([10, *range(32, 127)], 3)
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(""), "isolated")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<e>", pad_token="<pad>", additional_special_tokens=["<s>"]
    )
    fast.chat_template = template
    return fast


@dataclass
class Talking(ScriptedEngine):
    """An engine that writes the next of `says` in each turn, and remembers what it read."""

    tokenizer: Any = field(default_factory=chat_tokenizer)
    max_length: int = 10_000
    says: list[str] = field(default_factory=list)
    read: list[str] = field(default_factory=list)

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingConfig, n: int) -> list[Completion]:
        self.read.append("".join(self.tokenizer.convert_ids_to_tokens(prompt_ids)))
        text = self.says[len(self.read) - 1]
        ids = [*self.tokenizer.encode(text), EOS]
        return [Completion(ids, [-0.5] * len(ids), text, "stop", [0] * len(ids))] * n


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: One of them.
        b: The other.
    """
    return a + b


async def slow_add(a: int, b: int) -> str:
    """Adds two numbers.

    Args:
        a: One of them.
        b: The other.
    """
    await asyncio.sleep(0)
    return f"it is {a + b}"


CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
CHAT = [{"prompt": [{"role": "user", "content": "2+3?"}]}]


async def talk(
    *says: str, tools: Any = (add,), template: str = TEMPLATE, **options: Any
) -> tuple[RolloutGroup, Talking]:
    engine = Talking(says=list(says), tokenizer=chat_tokenizer(template))
    return await played(tool_loop(tools, **options), engine, group_size=1, prompts=CHAT), engine


@pytest.mark.parametrize(("tool", "answer"), [(add, "5"), (slow_add, "it is 5")])
async def test_the_policy_reads_what_its_tool_answers_and_the_answer_is_not_trained_on(tool: Any, answer: str) -> None:
    call = f'<tool_call>{{"name": "{tool.__name__}", "arguments": {{"a": 2, "b": 3}}}}</tool_call>'
    group, engine = await talk(call, "5", tools=[tool])
    begin = "<s>user\n2+3?<e>\n<s>assistant\n"
    between = f"\n<s>tool\n{answer}<e>\n<s>assistant\n"
    assert engine.read == [begin, f"{begin}{call}<e>{between}"]
    tokens = "".join(engine.tokenizer.convert_ids_to_tokens(group.completion_ids))
    assert tokens == f"{call}<e>{between}5<e>"
    assert group.trained_mask.sum() == len(call) + 1 + len("5") + 1
    assert not group.trained_mask[len(call) + 1 : -2].any()
    assert group.finish_reasons == ("stop",)


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        ('{"name": "add", "arguments": {"a": 1}}', r"error: TypeError: .* missing 1 required positional argument"),
        ('{"name": "sub", "arguments": {}}', "error: there is no tool 'sub'; there are add"),
        ('{"name": "add", ', r"error: not a call: \{\"name\": \"add\","),
        ('{"name": 3, "arguments": {}}', "error: not a call: .*; the name is a string"),
    ],
)
async def test_a_call_that_fails_is_told_to_the_policy(call: str, answer: str) -> None:
    _, engine = await talk(f"<tool_call>{call}</tool_call>", "so be it")
    assert re.search(rf"<s>tool\n{answer}", engine.read[1])


async def test_a_rollout_ends_after_its_last_turn_and_before_it_outgrows_the_engine() -> None:
    call = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
    group, engine = await talk(*[call] * 9, max_turns=3)
    assert (len(engine.read), group.finish_reasons) == (3, ("turns",))
    assert group.trained_mask[-1]
    group, engine = await talk(*[call] * 199, max_turns=199)
    assert group.finish_reasons == ("length",)


async def test_a_template_that_renders_earlier_turns_differently_is_refused() -> None:
    call = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
    with pytest.raises(PromptError, match="renders earlier turns differently after an answer of a tool"):
        await talk(call, "5", template=FORGETS)


THOUGHT = "<think>\nI add.\n</think>\n\n"
NO_TOOL = TEMPLATE.replace(
    "{% for message in messages %}", "{% for message in messages if message['role'] != 'tool' %}"
)
ONE_THOUGHT = TEMPLATE.replace(
    "{{ message['content'] }}", "{{ message['content'] if loop.last else message['content'].split('</think>')[-1] }}"
)


@pytest.mark.parametrize(
    ("template", "thought", "says"),
    [
        (NO_TOOL, "", "the chat template leaves out the answer of a tool"),
        (ONE_THOUGHT, THOUGHT, "the chat template renders earlier turns differently after an answer of a tool"),
        (
            TEMPLATE.replace("{{ message['content']", "{{ message['content'].replace('I', 'You')"),
            THOUGHT,
            "changes what",
        ),
    ],
    ids=["forgets answers", "forgets thoughts", "changes words"],
)
async def test_a_template_by_which_others_would_read_something_else_is_refused(
    template: str, thought: str, says: str
) -> None:
    with pytest.raises(PromptError, match=says):
        await talk(f"{thought}{CALL}", "5", template=template)


async def test_a_template_that_forgets_thoughts_is_taken_while_there_are_none() -> None:
    _, engine = await talk(CALL, "5", template=ONE_THOUGHT)
    assert len(engine.read) == 2


async def test_a_template_may_trim_what_the_policy_wrote_which_stays_as_it_drew_it() -> None:
    _, engine = await talk(f" {CALL}\n\n", "5", template=TEMPLATE.replace("['content'] }}", "['content'] | trim }}"))
    assert engine.read[1].startswith(f"{engine.read[0]} {CALL}\n\n<e>\n<s>tool\n5<e>")


def shipped_template(name: str) -> str:
    """A template as its model has it, or as TRL changed it for training."""
    trl = pytest.importorskip("trl")
    return (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text()


@pytest.mark.parametrize(
    ("name", "thought", "says"),
    [
        ("qwen2_5", "", ""),
        ("qwen2_5", THOUGHT, ""),
        ("qwen3", "", ""),
        ("qwen3", THOUGHT, ""),  # it keeps the thoughts of turns after the last message of the user
        ("qwen3_training", THOUGHT, ""),
        ("qwen3_training", "", "renders earlier turns differently"),  # it writes that the model thought nothing
        ("qwen3_instruct_2507", "", ""),
        ("phi3", "", "leaves out the answer of a tool"),
        ("gemma", "", "roles must alternate"),
        ("deepseekv3", "", "renders earlier turns differently"),
    ],
)
async def test_the_templates_of_models_extend_what_was_sampled_or_are_refused(
    name: str, thought: str, says: str
) -> None:
    said = f"{thought}{CALL}"
    work = talk(said, "5", template=shipped_template(name))
    if says:
        with pytest.raises(PromptError, match=says):
            await work
        return
    _, engine = await work
    assert engine.read[1].startswith(f"{engine.read[0]}{said}<e>")
    assert re.search(r"\b5\b", engine.read[1].removeprefix(f"{engine.read[0]}{said}<e>"))


async def test_the_tool_loop_gives_the_template_what_the_generator_is_configured_with() -> None:
    engine = Talking(says=[CALL, "5"], tokenizer=chat_tokenizer("{{ tone }}" + TEMPLATE))
    await played(tool_loop([add]), engine, group_size=1, prompts=CHAT, chat_template={"tone": "kind"})
    assert all(text.startswith("kind<s>user") for text in engine.read)


async def test_a_prompt_that_ends_with_words_of_the_assistant_is_refused() -> None:
    messages = [*CHAT[0]["prompt"], {"role": "assistant", "content": "It is"}]
    with pytest.raises(PromptError, match="end the prompt with a message of the user"):
        await played(tool_loop([add]), Talking(), group_size=1, prompts=[{"prompt": messages}])


async def test_a_prompt_without_messages_is_refused() -> None:
    with pytest.raises(PromptError, match="a tool loop needs prompts of messages"):
        await played(tool_loop([add]))


def test_calls_are_found_in_a_text() -> None:
    two = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call> and <tool_call>{"name": "g"}</tool_call>'
    assert json_calls(f"I think. {two}") == [ToolCall("f", {"x": 1}), ToolCall("g", {})]
    assert json_calls("nothing") == []


def test_tools_of_one_name_and_no_turns_are_refused() -> None:
    with pytest.raises(ValueError, match="tools need names of their own, not add, add"):
        tool_loop([add, add])
    with pytest.raises(ValueError, match="max_turns must be at least 1, not 0"):
        tool_loop([add], max_turns=0)
    with pytest.raises(ValueError, match="min_rollouts 9 is more than group_size 4"):
        GeneratorConfig(group_size=4, min_rollouts=9)
    assert issubclass(RolloutError, Exception)


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


async def test_a_hook_that_is_a_context_is_open_while_rollouts_are_played() -> None:
    browser = Browser()
    await generate(RecordingClient(), ScriptedEngine(completions=[SAID]), browser, reward=None, max_groups=3)
    assert (browser.opened, browser.open) == (1, False)


async def test_a_hook_that_cannot_be_opened_ends_the_run_and_closes_the_engine() -> None:
    engine = ScriptedEngine(completions=[SAID])
    with pytest.raises(RolloutError, match="no browser is installed"):
        await generate(RecordingClient(), engine, Browser(fails=True))
    assert engine.closed == 1


async def test_metrics_that_all_rollouts_have_are_stored_and_do_not_count_in_the_reward(tmp_path: Path) -> None:
    client, path = RecordingClient(), tmp_path / "metrics.jsonl"
    engine = ScriptedEngine(completions=[SAID])
    await generate(client, engine, Browser(), reward=None, group_size=2, max_groups=2, metrics_path=path)
    for group, _ in client.inserts:
        assert group.rewards.tolist() == group.extras["rewards/rollout/clicks"].tolist() == [0.0, 1.0]
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
def test_an_environment_is_named_by_its_package_and_has_an_object_of_arguments(
    source: str, args: str | None, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        load_environment(source, args)

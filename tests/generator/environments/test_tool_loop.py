"""The hook for tools that are Python functions: what the policy reads, and which templates it takes."""

import asyncio
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from replay_client import RolloutGroup
from replay_generator import GeneratorConfig, PromptError, RolloutError
from replay_generator.engines import Completion, SamplingConfig
from replay_generator.rollouts.tool_loop import ToolCall, json_calls, tool_loop
from replay_generator.testing import EOS, ScriptedEngine
from tests.kit.generators import played
from tests.kit.models import shipped_template

pytestmark = pytest.mark.filterwarnings("error:coroutine:RuntimeWarning")


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

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingConfig, n: int, *_: Any) -> list[Completion]:
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
async def test_the_policy_reads_what_its_tool_answers_and_the_answer_is_not_trained_on(tool, answer):
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
async def test_a_call_that_fails_is_told_to_the_policy(call, answer):
    _, engine = await talk(f"<tool_call>{call}</tool_call>", "so be it")
    assert re.search(rf"<s>tool\n{answer}", engine.read[1])


def leave() -> str:
    """Leaves."""
    sys.exit("bye")


async def leave_later() -> str:
    """Leaves."""
    raise KeyboardInterrupt("bye")


@pytest.mark.parametrize(
    ("tool", "answer"),
    [
        (leave, "error: SystemExit: bye"),
        (leave_later, "error: KeyboardInterrupt: bye"),
    ],
)
async def test_a_tool_that_wants_to_end_the_process_answers(tool, answer):
    call = f'<tool_call>{{"name": "{tool.__name__}", "arguments": {{}}}}</tool_call>'
    _, engine = await talk(call, "so be it", tools=[tool])
    assert f"<s>tool\n{answer}" in engine.read[1]


async def test_a_rollout_ends_after_its_last_turn_and_before_it_outgrows_the_engine():
    call = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
    group, engine = await talk(*[call] * 9, max_turns=3)
    assert len(engine.read) == 3
    assert group.finish_reasons == ("turns",)
    assert group.trained_mask[-1]
    group, engine = await talk(*[call] * 199, max_turns=199)
    assert group.finish_reasons == ("length",)


async def test_a_template_that_renders_earlier_turns_differently_is_refused():
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
async def test_a_template_by_which_others_would_read_something_else_is_refused(template, thought, says):
    with pytest.raises(PromptError, match=says):
        await talk(f"{thought}{CALL}", "5", template=template)


async def test_a_template_that_forgets_thoughts_is_taken_while_there_are_none():
    _, engine = await talk(CALL, "5", template=ONE_THOUGHT)
    assert len(engine.read) == 2


async def test_a_template_may_trim_what_the_policy_wrote_which_stays_as_it_drew_it():
    _, engine = await talk(f" {CALL}\n\n", "5", template=TEMPLATE.replace("['content'] }}", "['content'] | trim }}"))
    assert engine.read[1].startswith(f"{engine.read[0]} {CALL}\n\n<e>\n<s>tool\n5<e>")


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
async def test_the_templates_of_models_extend_what_was_sampled_or_are_refused(name, thought, says):
    said = f"{thought}{CALL}"
    work = talk(said, "5", template=shipped_template(name))
    if says:
        with pytest.raises(PromptError, match=says):
            await work
        return
    _, engine = await work
    assert engine.read[1].startswith(f"{engine.read[0]}{said}<e>")
    assert re.search(r"\b5\b", engine.read[1].removeprefix(f"{engine.read[0]}{said}<e>"))


async def test_the_tool_loop_gives_the_template_what_the_generator_is_configured_with():
    engine = Talking(says=[CALL, "5"], tokenizer=chat_tokenizer("{{ tone }}" + TEMPLATE))
    await played(tool_loop([add]), engine, group_size=1, prompts=CHAT, chat_template_kwargs={"tone": "kind"})
    assert all(text.startswith("kind<s>user") for text in engine.read)


@pytest.mark.parametrize("words", ["It is ", " It is", "<think>\nhm, "])
async def test_the_first_turn_goes_on_with_the_words_of_the_assistant_in_the_prompt(words):
    messages = [*CHAT[0]["prompt"], {"role": "assistant", "content": words}]
    said = f"well.</think>{CALL}" if "<think>" in words else CALL
    engine = Talking(says=[said, "5"])
    await played(tool_loop([add]), engine, group_size=1, prompts=[{"prompt": messages}])
    assert engine.read[0].endswith(f"assistant\n{words}")
    assert engine.read[1].startswith(f"{engine.read[0]}{said}<e>")
    assert "5" in engine.read[1].removeprefix(f"{engine.read[0]}{said}<e>")


def named(*names):
    return [{"type": "function", "function": {"name": name, "description": "As the row says."}} for name in names]


async def test_the_tools_of_a_row_choose_among_the_functions():
    def subtract(a: int, b: int) -> int:
        """Subtracts.

        Args:
            a: One.
            b: Another.
        """
        return a - b

    engine = Talking(says=[CALL, "5"], tokenizer=chat_tokenizer("{{ tools | tojson }}" + TEMPLATE))
    rows = [{"prompt": CHAT[0]["prompt"], "tools": named("subtract")}]
    await played(tool_loop([add, subtract]), engine, group_size=1, prompts=rows)
    assert engine.read[0].startswith(json.dumps(named("subtract")))
    assert "there is no tool 'add'; there are subtract" in engine.read[1]
    rows = [{"prompt": CHAT[0]["prompt"], "tools": named("divide")}]
    with pytest.raises(PromptError, match="'tools' name 'divide', and the tool loop has add: give it this function"):
        await played(tool_loop([add]), Talking(), group_size=1, prompts=rows)


async def test_a_prompt_without_messages_is_refused():
    with pytest.raises(PromptError, match="a tool loop needs prompts of messages"):
        await played(tool_loop([add]))


def test_calls_are_found_in_a_text():
    two = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call> and <tool_call>{"name": "g"}</tool_call>'
    assert json_calls(f"I think. {two}") == [ToolCall("f", {"x": 1}), ToolCall("g", {})]
    assert json_calls("nothing") == []


def test_tools_of_one_name_and_no_turns_are_refused():
    with pytest.raises(ValueError, match="tools need names of their own, not add, add"):
        tool_loop([add, add])
    with pytest.raises(ValueError, match="max_turns must be at least 1, not 0"):
        tool_loop([add], max_turns=0)
    with pytest.raises(ValueError, match="min_rollouts 9 is more than group_size 4"):
        GeneratorConfig(group_size=4, min_rollouts=9)
    assert issubclass(RolloutError, Exception)

"""Messages as a chat template reads them, whichever door they come through."""

import json
from datetime import datetime

import pytest
from tokenizers import processors

from replay_generator import notices
from replay_generator.engines import SamplingConfig
from replay_generator.groups.codec import PartialGroupSpec
from replay_generator.prompts.chat import ChatError, render, text_ids
from replay_generator.prompts.prompt import Prompt
from replay_generator.rollouts.rollout import RolloutError, Task
from replay_generator.rollouts.sessions.conversation import Conversation
from tests.kit.models import make_chat_tokenizer, shipped_template

ASKED = {"role": "user", "content": "Weather in Rome?"}
SEEN = {"role": "tool", "tool_call_id": "c1", "content": "24"}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def called(arguments, **fields):
    function = {"name": "weather", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "c1", "type": "function", "function": function}]} | fields


def rendered_by_hand(tokenizer, messages, **arguments):
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **arguments)


def of_row(tokenizer, messages, tools):
    """A row of a file, or of a data set."""
    prompt = Prompt.of({"prompt": messages, "tools": tools})
    return tokenizer.decode(prompt.tokenize(tokenizer))


def of_hook(tokenizer, messages, tools):
    """A hook, or a client of a session."""
    task = Task("p", [], {}, None, 0, SamplingConfig(), tokenizer, 1000)
    return Conversation.begin(task, messages, tools)[0].rendered


@pytest.mark.parametrize("tell", [of_row, of_hook, render])
@pytest.mark.parametrize("template", ["qwen3", "qwen2_5", "llama3_1", "deepseekv3"])
@pytest.mark.parametrize(
    ("given", "cleaned"),
    [
        ([{**ASKED, "tool_calls": None, "name": None}], [ASKED]),
        ([{**ASKED, "tool_calls": []}], [ASKED]),
        ([{"role": "user", "content": None}], [{"role": "user", "content": ""}]),
        ([{"role": "user", "content": []}], [{"role": "user", "content": ""}]),
        ([{"role": "user", "content": [{"type": "text", "text": "Weather in Rome?"}]}], [ASKED]),
        ([{"role": "user", "content": [{"text": "Weather ", "type": None}, "in Rome?"]}], [ASKED]),
        ([{"role": "user", "content": [{"type": "text", "text": "Weather in Rome?", "image_url": None}]}], [ASKED]),
        (
            [{"role": "developer", "content": "Be brief."}, ASKED],
            [{"role": "system", "content": "Be brief."}, ASKED],
        ),
    ],
    ids=["nulls", "no calls", "null", "no parts", "a part", "parts", "null in a part", "developer"],
)
def test_messages_are_told_as_if_somebody_had_cleaned_them(template, given, cleaned, tell):
    tokenizer = make_chat_tokenizer(shipped_template(template))
    assert tell(tokenizer, given, []) == rendered_by_hand(tokenizer, cleaned)


@pytest.mark.parametrize("tell", [of_row, of_hook, render])
@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        (called('{"city":"Rome","day":null}'), {"city": "Rome", "day": None}),
        (called({"city": "Rome", "day": None}), {"city": "Rome", "day": None}),
        (called('{"city": "Rome"}', content=None, name=None), {"city": "Rome"}),
        (called(""), {}),
        (called(None), {}),
        ({"role": "assistant", "tool_calls": [{"name": "weather", "arguments": '{"city": "Rome"}'}]}, {"city": "Rome"}),
    ],
    ids=["JSON", "an object", "nulls beside", "empty", "null", "no function"],
)
def test_arguments_of_calls_are_objects_for_the_template_and_their_nulls_stay(call, arguments, tell):
    tokenizer = make_chat_tokenizer(shipped_template("qwen3"))
    cleaned = [ASKED, called(arguments, content=""), SEEN]
    assert tell(tokenizer, [ASKED, call, SEEN], TOOLS) == rendered_by_hand(tokenizer, cleaned, tools=TOOLS)


CONCATENATES = CHATML.replace(
    "{{ message.content }}",
    "{{ message.content }}{% for each in message.tool_calls or [] %}{{ 'C' + each.function.arguments }}{% endfor %}",
)
PRINTS = CONCATENATES.replace("'C' + each", "each")


@pytest.mark.parametrize("template", [CONCATENATES, PRINTS])
@pytest.mark.parametrize("arguments", ['{"city":"Rome"}', {"city": "Rome"}], ids=["JSON", "an object"])
def test_a_template_that_wants_arguments_as_text_gets_their_json(template, arguments):
    tokenizer = make_chat_tokenizer(template)
    text = arguments if isinstance(arguments, str) else '{"city": "Rome"}'
    by_hand = rendered_by_hand(tokenizer, [ASKED, called(text, content=""), SEEN])
    assert render(tokenizer, [ASKED, called(arguments), SEEN]) == by_hand
    assert text in by_hand


APART = (
    "{% for message in messages %}{% if '</think>' in message.content %}{{ raise_exception('apart') }}{% endif %}"
    "[{{ message.role }}|{{ message.reasoning_content }}|{{ message.content }}]{% endfor %}"
)


def test_a_template_that_wants_thoughts_apart_gets_them_so():
    thought = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nRain."}
    said = render(make_chat_tokenizer(APART), [ASKED, thought, ASKED])
    assert said == "[user||Weather in Rome?][assistant|hm|Rain.][user||Weather in Rome?]"


ONE_SYSTEM = CHATML.replace(
    "{% for message in messages %}",
    "{% for message in messages %}{% if message.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}",
)
"""As templates of Qwen 3.5 and later have it."""


def of(role, *texts):
    return [{"role": role, "content": text} for text in texts]


ASKED_TWICE = [ASKED, {"role": "assistant", "content": "Rain."}]


@pytest.mark.parametrize("tell", [of_row, of_hook, render])
@pytest.mark.parametrize(
    ("given", "folded"),
    [
        ([*of("system", "a", "b"), ASKED], [*of("system", "a\n\nb"), ASKED]),
        ([*of("system", "a"), *of("developer", "b"), ASKED], [*of("system", "a\n\nb"), ASKED]),
        ([*of("developer", "a", "b", "c"), ASKED], [*of("system", "a\n\nb\n\nc"), ASKED]),
        ([*of("user", "x"), *of("system", "a")], of("user", "x\n\na")),
        ([*of("user", "x"), *of("system", "a"), *of("user", "y")], of("user", "x\n\na\n\ny")),
        (
            [*of("system", "s"), *ASKED_TWICE, *of("system", "a", "b"), *of("user", "y")],
            [*of("system", "s"), *ASKED_TWICE, *of("user", "a\n\nb\n\ny")],
        ),
        ([*ASKED_TWICE, *of("developer", "a")], [*ASKED_TWICE, *of("user", "a")]),
        ([*of("user", "x", "y"), *of("system", "a")], [*of("user", "x", "y\n\na")]),
        ([*of("system", "s"), *of("user", "x")], [*of("system", "s"), *of("user", "x")]),
    ],
)
def test_a_template_that_refuses_messages_of_the_system_gets_one_at_the_top(given, folded, tell):
    tokenizer = make_chat_tokenizer(ONE_SYSTEM)
    assert tell(tokenizer, given, []) == rendered_by_hand(tokenizer, folded)


def test_a_template_that_takes_messages_of_the_system_where_they_are_gets_them_there():
    tokenizer = make_chat_tokenizer(CHATML)
    given = [*of("system", "a", "b"), ASKED, *of("system", "c")]
    assert render(tokenizer, given) == rendered_by_hand(tokenizer, given)


@pytest.mark.parametrize("tell", [of_row, of_hook, render])
@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "'image_url', which no text"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "'input_audio', which no text"),
        ({"role": "user", "content": ["a", 3]}, "is 3, which no text"),
        ({"role": "user", "content": [{"type": "text", "text": 3}]}, "is 3, which is no text"),
        ({"role": "user", "content": 3}, "must be a text, or a list of parts, not 3"),
        ({"role": "user", "content": {"text": "a"}}, "must be a text, or a list of parts"),
        ({"role": "user"}, "needs a 'role' and a 'content'"),
        ({"role": "user", "content": [{"image_url": {"url": "x"}}]}, "has 'image_url' and no 'text'"),
        ({"role": "user", "content": [{"type": None, "text": None, "image": "x"}]}, "has 'image' and no 'text'"),
        ({"role": "user", "content": [{"type": "text", "content": "a"}]}, "has 'content' and no 'text'"),
        ({"role": "assistant", "function_call": {"name": "f"}, "content": None}, "write it as one of its tool_calls"),
        ({"role": None, "content": "a"}, "needs a 'role' and a 'content'"),
        ({"role": "assistant", "tool_calls": "[1]"}, "must be a list of objects"),
    ],
)
def test_a_message_that_no_text_model_can_take_is_refused_by_its_number(message, says, tell):
    tokenizer = make_chat_tokenizer(CHATML)
    with pytest.raises((ChatError, RolloutError, ValueError), match=f"message 2: .*{says}"):
        tell(tokenizer, [ASKED, message, ASKED], [])


@pytest.mark.parametrize(
    "arguments", ["{'a': 1}", "[1]", "3", "nonsense", "[" * 100_000, 3], ids=lambda each: str(each)[:9]
)
def test_a_row_whose_call_has_no_object_as_arguments_is_refused(arguments):
    with pytest.raises(ValueError, match="the arguments of a call"):
        Prompt.of([ASKED, called(arguments), SEEN])


# ------------------------------------------------------------------------------------------ tools and kwargs of a row


@pytest.mark.parametrize(
    "tools",
    [TOOLS, tuple(TOOLS), [TOOLS[0]["function"]], '[{"name": "weather"}]', ['{"name": "weather"}']],
    ids=["a list", "a tuple", "no function", "JSON", "JSON each"],
)
def test_the_tools_of_a_row_go_to_the_template(tools):
    tokenizer = make_chat_tokenizer(shipped_template("qwen3"))
    told = {"list": list, "tuple": list, "str": lambda _: [{"name": "weather"}]}[type(tools).__name__](tools)
    told = [{"name": "weather"}] if isinstance(told[0], str) else told
    ids = Prompt.of({"prompt": [ASKED], "tools": tools}).tokenize(tokenizer)
    assert ids == tokenizer.apply_chat_template([ASKED], tools=told, add_generation_prompt=True, return_dict=False)


@pytest.mark.parametrize("tools", [None, [], ""])
def test_a_row_without_tools_has_none(tools):
    tokenizer = make_chat_tokenizer(shipped_template("qwen3"))
    assert of_row(tokenizer, [ASKED], tools) == rendered_by_hand(tokenizer, [ASKED])


@pytest.mark.parametrize("given", [{"enable_thinking": False}, '{"enable_thinking": false}'])
def test_the_arguments_of_a_row_go_to_the_template_and_win(given):
    tokenizer = make_chat_tokenizer(shipped_template("qwen3"))
    prompt = Prompt.of({"prompt": [ASKED], "chat_template_kwargs": given})
    by_hand = rendered_by_hand(tokenizer, [ASKED], enable_thinking=False)
    assert tokenizer.decode(prompt.tokenize(tokenizer, enable_thinking=True)) == by_hand
    assert prompt.template() == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"tools": ["weather"]}, "'tools' is a text that is no JSON, 'weather'"),
        ({"tools": [3]}, "rename it"),
        ({"tools": [{"description": "no name"}]}, "rename it"),
        ({"tools": {"name": "weather"}}, "must be a list of objects"),
        ({"tools": "[" * 100_000}, "nested too deeply"),
        ({"chat_template_kwargs": "low"}, "no JSON"),
        ({"chat_template_kwargs": [1]}, "must be an object"),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, "leave it out"),
        ({"chat_template_kwargs": {"tools": []}}, "leave it out"),
    ],
)
def test_columns_that_no_template_can_be_told_are_refused(fields, says):
    with pytest.raises(ValueError, match=says):
        Prompt.of({"prompt": [ASKED]} | fields)


def test_a_text_may_have_a_column_of_tools_that_are_not_for_a_template():
    assert Prompt.of({"prompt": "1+1=", "tools": ["hammer"]}).tools() == []


# ------------------------------------------------------------------------------------------ BOS


WITH_BOS = "{{ bos_token }}" + CHATML
TURN = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("template", "text", "beginning"),
    [
        (WITH_BOS, "hi", "<s>hi"),
        (WITH_BOS, f"<s>{TURN}", f"<s>{TURN}"),
        (WITH_BOS, TURN, f"<s>{TURN}"),  # somebody took it away, for the tokenizer writes it
        (CHATML, TURN, TURN),
        (CHATML, f"<s>{TURN}", f"<s>{TURN}"),
        (None, TURN, f"<s>{TURN}"),
        (None, "<s>hi", "<s>hi"),
    ],
)
def test_a_text_that_a_template_has_rendered_has_one_bos_at_most(template, text, beginning):
    tokenizer = make_chat_tokenizer(template, bos=True)
    expected = tokenizer.encode(beginning, add_special_tokens=False)
    assert Prompt.of(text).tokenize(tokenizer) == expected
    assert text_ids(tokenizer, text) == expected


def test_an_empty_text_is_bos_alone():
    assert text_ids(make_chat_tokenizer(CHATML, bos=True), "") == [0]


def test_an_empty_text_without_bos_is_refused_because_nothing_can_go_on():
    with pytest.raises(ChatError, match="the text '' has no tokens, and the tokenizer begins with none"):
        text_ids(make_chat_tokenizer(CHATML), "")


def test_a_tokenizer_without_bos_gets_none():
    tokenizer = make_chat_tokenizer(CHATML)
    assert Prompt.of("hi").tokenize(tokenizer) == tokenizer.encode("hi", add_special_tokens=False)


def test_messages_have_the_bos_of_their_template_alone():
    tokenizer = make_chat_tokenizer(WITH_BOS, bos=True)
    ids = Prompt.of([{"role": "user", "content": "hi"}]).tokenize(tokenizer)
    assert ids == tokenizer.encode(f"<s>{TURN}", add_special_tokens=False)


# ------------------------------------------------------------------------------------------ words of the assistant


@pytest.mark.parametrize("template", ["qwen3", "qwen2_5", "llama3_1", "gemma", "qwen3_instruct_2507"])
@pytest.mark.parametrize("words", ["It is", " It is ", "<think>\nhm, ", "<think>\nhm\n</think>\n\nIt is\n", ""])
def test_the_policy_goes_on_behind_the_words_of_the_assistant_as_they_are(template, words):
    tokenizer = make_chat_tokenizer(shipped_template(template))
    ids = Prompt.of([ASKED, {"role": "assistant", "content": words}]).tokenize(tokenizer)
    before = rendered_by_hand(tokenizer, [ASKED])
    assert ids == tokenizer.encode(f"{before}{words}", add_special_tokens=False)


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([ASKED, called("{}")], "end with the answer of its tool"),
        ([ASKED, {"role": "assistant", "content": "a", "reasoning_content": "b"}], "into its content"),
        ([{"role": "assistant", "content": "It is"}], "begin with one of the user"),
    ],
)
def test_what_nobody_can_go_on_with_is_refused(messages, says):
    with pytest.raises(ValueError, match=says):
        Prompt.of(messages)


# ------------------------------------------------------------------------------------------ today's date

DATED = "{{ strftime_now('%d %b %Y') }}: " + CHATML
EVENING = datetime(2025, 3, 1, 23, 59)


def test_the_day_on_which_a_rollout_began_stays():
    tokenizer = make_chat_tokenizer(DATED)
    task = Task("p", [], {}, None, 0, SamplingConfig(), tokenizer, 1000, began=EVENING)
    begun, _ = Conversation.begin(task, [ASKED])
    gone_on, _ = begun.go_on("Rain.", tokenizer.encode("<|im_end|>")[0], [ASKED])
    assert begun.rendered.startswith("01 Mar 2025: ")
    assert gone_on.rendered.startswith("01 Mar 2025: ")


def test_a_conversation_may_end_with_two_messages_of_the_assistant_and_goes_on_with_the_last():
    tokenizer = make_chat_tokenizer(CHATML)
    task = Task("p", [], {}, None, 0, SamplingConfig(), tokenizer, 1000)
    messages = [{"role": "assistant", "content": "Hello."}, {"role": "assistant", "content": "It is"}]
    begun, ids = Conversation.begin(task, messages)
    assert begun.words == "It is"
    assert tokenizer.decode(ids) == "<|im_start|>assistant\nHello.<|im_end|>\n<|im_start|>assistant\nIt is"


def test_a_prompt_has_the_day_on_which_its_group_began():
    tokenizer = make_chat_tokenizer(shipped_template("llama3_2"))
    ids = Prompt.of([ASKED]).tokenize(tokenizer, began=EVENING)
    assert "Today Date: 01 Mar 2025" in tokenizer.decode(ids)


def test_whoever_finishes_a_group_tells_its_template_the_day_of_its_opener():
    spec = PartialGroupSpec(1, Prompt.of("a"), [5], 0, 3, SamplingConfig(), began=EVENING.isoformat())
    assert PartialGroupSpec.decode(spec.encode())[0].began == EVENING.isoformat()


def test_a_template_that_fails_says_why():
    tokenizer = make_chat_tokenizer("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ChatError, match="refuses the messages: TemplateError: roles must alternate"):
        render(tokenizer, [ASKED])


def test_arguments_that_people_quote_or_that_read_alike_in_json_are_no_python():
    quoted = [{"role": "user", "content": "Call it with {'city': 'Rome'}"}, called({"city": "Rome"}), SEEN]
    alike = [ASKED, called({"it's": 1}), SEEN]
    tokenizer = make_chat_tokenizer(shipped_template("qwen3"))
    for messages in (quoted, alike):
        assert render(tokenizer, messages) == rendered_by_hand(tokenizer, messages)


def test_calls_may_be_json_as_a_whole():
    tokenizer = make_chat_tokenizer(shipped_template("qwen3"))
    calls = called({"city": "Rome"})["tool_calls"]
    told = Prompt.of([ASKED, {"role": "assistant", "tool_calls": json.dumps(calls)}, SEEN]).tokenize(tokenizer)
    assert told == Prompt.of([ASKED, called({"city": "Rome"}), SEEN]).tokenize(tokenizer)


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "\ud83d"}],
        [{**ASKED, "name": "\ud83d"}, ASKED],
        [ASKED, called({"city": ["\ud83d"]}), SEEN],
    ],
    ids=["content", "name", "arguments"],
)
@pytest.mark.parametrize("tell", [of_row, of_hook])
def test_half_a_surrogate_is_refused_before_the_tokenizer_wherever_it_stands(messages, tell):
    template = "{% for message in messages %}{{ message | tojson }}{% endfor %}"
    with pytest.raises((ValueError, RolloutError), match="half of a surrogate pair"):
        tell(make_chat_tokenizer(template), messages, [])


@pytest.mark.parametrize("tell", [of_row, of_hook, render])
@pytest.mark.parametrize("arguments", ['{"city": "\\ud83d"}', '{"\\udc00": 1}', '{"a": [{"b": "x\\ud83dy"}]}'])
@pytest.mark.parametrize("template", ["{{ messages | tojson }}", "{% for m in messages %}{{ m.content }}{% endfor %}"])
def test_half_a_surrogate_in_the_json_of_arguments_is_refused(template, arguments, tell):
    with pytest.raises((ValueError, RolloutError), match="half of a surrogate pair"):
        tell(make_chat_tokenizer(template), [ASKED, called(arguments), SEEN], [])


WANTS_TEXT = (
    "{% for message in messages %}{% for call in message.tool_calls or [] %}"
    "{{ '' + call.function.arguments }}{% endfor %}{{ message.content }}{% endfor %}"
)
WANTS_THOUGHTS = (
    "{% for message in messages %}{% if '</think>' in message.content %}{{ raise_exception('no thoughts') }}{% endif %}"
    "{{ message.content }}{% endfor %}"
)
WANTS_ONE_SYSTEM = (
    "{% for message in messages %}{% if message.role == 'system' and loop.index > 1 %}"
    "{{ raise_exception('no system') }}{% endif %}{{ message.content }}{% endfor %}"
)
THOUGHT = {"role": "assistant", "content": "<think>hm</think>24"}
LATER = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    ("template", "messages", "said"),
    [
        (WANTS_TEXT, [ASKED, called({"city": "Rome"}), SEEN], "the arguments of calls as the text of their JSON"),
        (WANTS_THOUGHTS, [ASKED, THOUGHT, ASKED], "thoughts of the assistant apart from its content"),
        (WANTS_ONE_SYSTEM, [ASKED, LATER], "messages of the system as one at the top"),
        (WANTS_ONE_SYSTEM, [LATER, ASKED], ""),
        (CHATML, [ASKED, THOUGHT, ASKED], ""),
    ],
    ids=["text", "thoughts", "system", "as they are", "as they are too"],
)
@pytest.mark.parametrize("tell", [of_row, of_hook, render])
def test_the_log_says_once_in_which_other_form_a_template_is_told_messages(template, messages, said, tell, caplog):
    notices.forget()
    tokenizer = make_chat_tokenizer(template)
    for _ in range(2):
        tell(tokenizer, messages, [])
    lines = [line for line in caplog.messages if "the chat template refuses the messages as they are" in line]
    if not said:
        assert lines == []
        return
    (line,) = lines
    assert said in line
    assert "Error: " in line


@pytest.mark.parametrize(
    "column", [{"tools": '[{"name": "\\ud83d"}]'}, {"chat_template_kwargs": '{"a": {"b": "\\ud83d"}}'}]
)
def test_half_a_surrogate_in_the_json_of_a_column_is_refused(column):
    with pytest.raises(ValueError, match="half of a surrogate pair"):
        Prompt.of({"prompt": [ASKED]} | column)


def test_the_template_that_arguments_name_among_several_is_the_one_that_is_looked_at():
    tokenizer = make_chat_tokenizer(None)
    tokenizer.chat_template = {"default": CHATML, "dated": DATED}
    ids = Prompt.of([ASKED]).tokenize(tokenizer, began=EVENING, chat_template="dated")
    assert tokenizer.decode(ids).startswith("01 Mar 2025: ")


def test_a_tokenizer_with_other_first_tokens_than_bos_writes_them_once_and_its_last_ones_never():
    tokenizer = make_chat_tokenizer(None, bos=True)
    around = processors.TemplateProcessing(
        "<|im_start|> <s> $A </s>", None, [("<|im_start|>", 2), ("<s>", 0), ("</s>", 1)]
    )
    tokenizer.backend_tokenizer.post_processor = around
    whole = tokenizer.encode("<|im_start|><s>hi", add_special_tokens=False)
    assert text_ids(tokenizer, "hi") == whole
    assert text_ids(tokenizer, "<|im_start|><s>hi") == whole

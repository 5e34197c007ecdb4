"""Which messages go on after a turn of ours: whatever a client rewrites, and whatever makes them another's."""

from __future__ import annotations

import copy
import json
import logging
import random
from typing import Any

import pytest

from replay_generator import notices
from replay_generator.engines import Completion, SamplingConfig
from replay_generator.rollouts.sessions.exchanges import Exchange, Exchanges
from replay_generator.rollouts.sessions.turns import Answer, WrittenCall, object_of

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
SYSTEM = {"role": "system", "content": "Be brief."}
ASKED = {"role": "user", "content": "2+3?"}
NEXT = {"role": "user", "content": "and?"}


def answer(
    text: str = "", *arguments: str, thoughts: str = "", id: str = "a", ids: tuple[str, ...] | None = None
) -> Answer:
    names = ids or tuple(f"{id}{n}" for n in range(len(arguments)))
    calls = [WrittenCall(name, "add", each) for name, each in zip(names, arguments, strict=True)]
    return Answer(id, text, thoughts, calls, "stop", None, 1, 1)


def told(answer: Answer, **fields: Any) -> dict[str, Any]:
    """A turn as a dialect tells what a client repeats."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.text}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    calls = []
    for call in answer.calls:
        found = object_of(call.arguments)
        arguments = call.arguments if found is None else found
        calls.append({"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}})
    if calls:
        message["tool_calls"] = calls
    return message | fields


def calling(answer: Answer, *arguments: Any, ids: tuple[str, ...] | None = None) -> dict[str, Any]:
    """The same with other arguments, and other ids."""
    message = copy.deepcopy(told(answer))
    for number, (call, given) in enumerate(zip(message["tool_calls"], arguments, strict=True)):
        call["function"]["arguments"] = given
        if ids is not None:
            call["id"] = ids[number]
    return message


def result(id: str, text: str = "5") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": text}


def draw(exchanges: Exchanges, messages: list[Any], said: Answer, *, read: bool = True) -> Exchange:
    beginning = exchanges.after_messages(TOOLS, messages)
    exchange = Exchange(beginning.before, [1], read=read)
    exchanges.add(exchange, Completion([2], [-1.0], said.text, "stop", [0]), SamplingConfig())
    exchanges.answered(exchange, beginning, said)
    return exchange


SUM = answer("Let me see.", '{"a": 100.0, "b": [2, "x"]}', thoughts="hm")
TWO = answer("", '{"a": 1}', '{"a": 2}')
SLIP = answer("", "{'a': 1}")
OBJECT = {"a": 100.0, "b": [2, "x"]}

OURS = {
    "as it was": (SUM, told(SUM)),
    "no thoughts": (SUM, told(SUM, reasoning_content="")),
    "no text beside the call": (SUM, told(SUM, content="")),
    "null beside the call": (SUM, told(SUM, content=None)),
    "a number of JavaScript": (SUM, calling(SUM, {"a": 100, "b": [2, "x"]})),
    "a number of Python": (SUM, calling(SUM, {"a": 100.0, "b": [2.0, "x"]})),
    "names in another order": (SUM, calling(SUM, {"b": [2, "x"], "a": 100.0})),
    "ids of the client": (SUM, calling(SUM, OBJECT, ids=("z",))),
    "a slip": (SLIP, told(SLIP)),
    "a slip with an id of the client": (SLIP, calling(SLIP, "{'a': 1}", ids=("z",))),
    "a text": (answer("Yes"), told(answer("Yes"))),
    "a text without its thoughts": (answer("Yes", thoughts="hm"), told(answer("Yes"))),
}
OTHERS = {
    "another text": (SUM, told(SUM, content="Let me see!"), "its text"),
    "white space": (SUM, told(SUM, content="Let me see. "), "its text"),
    "other thoughts": (SUM, told(SUM, reasoning_content="hmm"), "its thoughts"),
    "thoughts of its own": (answer("Yes"), told(answer("Yes"), reasoning_content="hm"), "its thoughts"),
    "another number": (SUM, calling(SUM, {"a": 101, "b": [2, "x"]}), "the arguments of its call of 'add'"),
    "a longer list": (SUM, calling(SUM, {"a": 100, "b": [2, "x", 3]}), "the arguments of its call of 'add'"),
    "a shorter list": (SUM, calling(SUM, {"a": 100, "b": [2]}), "the arguments of its call of 'add'"),
    "another name": (SUM, calling(SUM, {"a": 100, "c": [2, "x"]}), "the arguments of its call of 'add'"),
    "a truth": (answer("", '{"a": 1}'), calling(answer("", '{"a": 1}'), {"a": True}), "the arguments"),
    "a number as a text": (answer("", '{"a": 1}'), calling(answer("", '{"a": 1}'), {"a": "1"}), "the arguments"),
    "a number of JavaScript with ids of the client": (
        SUM,
        calling(SUM, {"a": 100, "b": [2, "x"]}, ids=("z",)),
        "the arguments",
    ),
    "no text with ids of the client": (SUM, calling(SUM, OBJECT, ids=("z",)) | {"content": ""}, "its text"),
    "a call less": (TWO, told(answer("", '{"a": 1}')), "its calls"),
    "no call": (SUM, {"role": "assistant", "content": "Let me see."}, "its calls"),
    "calls the other way round": (TWO, calling(TWO, {"a": 2}, {"a": 1}), "the arguments"),
    "a slip mended": (SLIP, calling(SLIP, {"a": 1}), "the arguments"),
    "another slip": (SLIP, calling(SLIP, "{'a': 2}"), "the arguments"),
    "a text that is missing": (answer("Yes"), told(answer("")), "its text"),
}


@pytest.mark.parametrize(("said", "repeated"), OURS.values(), ids=OURS)
def test_a_turn_is_ours_whichever_way_its_client_repeats_it(said, repeated):
    exchanges = Exchanges()
    exchange = draw(exchanges, [SYSTEM, ASKED], said)
    found = exchanges.after_messages(TOOLS, [SYSTEM, ASKED, repeated, NEXT])
    assert found.before is exchange
    assert found.count == 3
    assert draw(exchanges, [SYSTEM, ASKED, repeated, NEXT], answer("more", id="b")).before is exchange


@pytest.mark.parametrize(("said", "changed", "what"), OTHERS.values(), ids=OTHERS)
def test_a_turn_that_was_changed_is_not_ours_and_the_log_says_once_what_differs(said, changed, what, caplog):
    notices.forget()
    exchanges = Exchanges()
    draw(exchanges, [SYSTEM, ASKED], said)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert exchanges.after_messages(TOOLS, [SYSTEM, ASKED, changed, NEXT]).before is None
    (record,) = caplog.records
    assert f"message 3, of the assistant, is another one than before in {what}" in record.getMessage()


@pytest.mark.parametrize("number", [0, 1])
def test_another_word_of_the_system_or_the_user_begins_a_new_sequence_which_is_said(number, caplog):
    notices.forget()
    exchanges = Exchanges()
    said = answer("Yes")
    draw(exchanges, [SYSTEM, ASKED], said)
    messages = [SYSTEM, ASKED, told(said), NEXT]
    messages[number] = messages[number] | {"content": messages[number]["content"] + " "}
    assert exchanges.after_messages(TOOLS, messages).before is None
    assert exchanges.after_messages(TOOLS[:0], [SYSTEM, ASKED, told(said), NEXT]).before is None
    role = messages[number]["role"]
    assert f"message {number + 1}, of the {role}, is another one" in caplog.text


def test_results_of_parallel_calls_may_come_in_any_order():
    exchanges = Exchanges()
    exchange = draw(exchanges, [ASKED], TWO)
    results = [result("a0"), result("a1", "6")]
    found = exchanges.after_messages(TOOLS, [ASKED, told(TWO), *results[::-1], NEXT])
    assert found.messages == [ASKED, told(TWO), *results, NEXT]
    second = draw(exchanges, [ASKED, told(TWO), *results[::-1]], answer("ok", id="b"))
    assert second.before is exchange
    assert exchanges.after_messages(TOOLS, [ASKED, told(TWO), *results, told(answer("ok"))]).before is second


@pytest.mark.parametrize(
    "behind",
    [
        [result("a1"), NEXT, result("a0")],
        [result("a1"), result("a1")],
        [result("a1"), result("x")],
        [result("a1")],
        [result("a1"), result("a0"), result("a0")],
    ],
)
def test_results_are_sorted_only_where_they_are_those_of_the_calls_each_once(behind):
    exchanges = Exchanges()
    draw(exchanges, [ASKED], TWO)
    messages = [ASKED, told(TWO), *behind]
    sorted_too = [ASKED, told(TWO), result("a0"), result("a1"), result("a0")]
    found = exchanges.after_messages(TOOLS, messages).messages
    assert found == (sorted_too if len(behind) == 3 and behind[1] != NEXT else messages)


def test_results_behind_a_turn_of_somebody_else_stay_as_they_are():
    messages = [ASKED, told(TWO), result("a1"), result("a0")]
    assert Exchanges().after_messages(TOOLS, messages).messages == messages


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (answer("same", thoughts="left", id="a"), answer("same", thoughts="right", id="b")),
        (answer("", '{"a": 1}', id="a"), answer("", '{"a": 1}', id="b")),
        (answer("x", '{"a": 1}', thoughts="t", id="a"), answer("x", '{"a": 1}', thoughts="t", id="b")),
    ],
    ids=["thoughts", "ids", "ids before thoughts"],
)
@pytest.mark.parametrize("read", [True, False])
def test_of_two_parallel_draws_with_equal_text_each_goes_on_after_its_own(one, other, read):
    for first, second in ((one, other), (other, one)):
        exchanges = Exchanges()
        drawn = [draw(exchanges, [ASKED], one, read=read), draw(exchanges, [ASKED], other)]
        for said in (first, second, first):
            found = exchanges.after_messages(TOOLS, [ASKED, told(said), NEXT])
            assert found.before is drawn[0 if said is one else 1]


def test_a_conversation_is_found_by_its_later_turns_where_the_earlier_ones_are_alike():
    exchanges = Exchanges()
    same, later = answer("same", id="a"), answer("later", id="c")
    draw(exchanges, [ASKED], same)
    second = draw(exchanges, [ASKED], answer("same", id="b"))
    exchanges.after_messages(TOOLS, [ASKED, told(same), NEXT]).before.followed = True
    third = draw(exchanges, [ASKED, told(same), NEXT], later)
    assert third.before is second
    found = exchanges.after_messages(TOOLS, [ASKED, told(same), NEXT, told(later), NEXT])
    assert found.before is third
    assert found.count == 4


@pytest.mark.long
def test_a_session_of_thousands_of_turns_is_one_sequence():
    exchanges = Exchanges()
    before = None
    for number in range(3000):
        before = Exchange(before, [number], "prompt" if before is None else "user", read=True)
        exchanges.add(before, Completion([7], [-1.0], "a", "stop", [0]), SamplingConfig())
    (sequence,) = exchanges.sequences(SamplingConfig())
    assert sequence.token_ids == [token for number in range(3000) for token in (number, 7)]
    assert before.size == 6000
    assert exchanges.after_tokens([*sequence.token_ids, 1]) is before
    assert exchanges.that_drew(sequence.token_ids[:10], ()) is before.path[4]


# ------------------------------------------------------------------------------------------------ one character

ALPHABET = 'ab1 .\n"'


def changed_text(text: str, numbers: random.Random) -> str:
    at = numbers.randrange(len(text) + 1)
    letter = numbers.choice(ALPHABET)
    way = numbers.randrange(3)
    if way == 0 or at == len(text):
        return text[:at] + letter + text[at:]
    if way == 1:
        return text[:at] + text[at + 1 :]
    return text[:at] + letter + text[at + 1 :]


def changed_message(message: dict[str, Any], numbers: random.Random) -> dict[str, Any] | None:
    """The message with one character of its words or of its arguments changed; None: it is an equal one."""
    message = copy.deepcopy(message)
    if message.get("tool_calls") and numbers.random() < 0.7:
        function = numbers.choice(message["tool_calls"])["function"]
        given = function["arguments"]
        text = given if isinstance(given, str) else json.dumps(given)
        text = changed_text(text, numbers)
        found = object_of(text)
        function["arguments"] = text if found is None else found
        return None if function["arguments"] == given else message
    before = message["content"]
    message["content"] = changed_text(before, numbers)
    if message["content"] == before or (message.get("tool_calls") and not message["content"]):
        return None
    return message


def test_one_character_of_any_message_begins_a_new_sequence():
    numbers = random.Random(57)
    cases = 0
    while cases < 10_000:
        exchanges = Exchanges()
        messages: list[dict[str, Any]] = [SYSTEM, ASKED]
        for turn in range(3):
            arguments = [
                numbers.choice(['{"a": "x", "b": 12.5}', "{'a': 1}", '{"c": [true, null, "y z"]}'])
                for _ in range(numbers.randrange(3))
            ]
            said = answer(numbers.choice(["So: ", "a"]), *arguments, id=f"t{turn}")
            draw(exchanges, messages, said)
            messages += [told(said), *(result(call.id, "24 C") for call in said.calls), NEXT]
        assert exchanges.after_messages(TOOLS, messages).count == max(
            at for at, message in enumerate(messages, 1) if message["role"] == "assistant"
        )
        for _ in range(50):
            at = numbers.randrange(len(messages))
            changed = changed_message(messages[at], numbers)
            if changed is None:
                continue
            cases += 1
            found = exchanges.after_messages(TOOLS, [*messages[:at], changed, *messages[at + 1 :]])
            assert found.count <= at, (messages[at], changed)


def test_among_equal_answers_to_several_conversations_that_of_the_lowest_digest_counts():
    for number in range(12):  # the order of a set of two is right by chance half of the time
        exchanges = Exchanges()
        first = answer(f"first {number}", id="a")
        for id in "ab":
            draw(exchanges, [ASKED], answer(f"first {number}", id=id))
        asked = [ASKED, told(first), NEXT]
        conversations = {}
        for id in "cd":
            last = exchanges.after_messages(TOOLS, asked)
            drawn = draw(exchanges, asked, answer("second", id=id))
            drawn.before.followed = True  # so that the next request continues the other answer
            conversations[last.digests[-1]] = drawn
        assert len(conversations) == 2
        found = exchanges.after_messages(TOOLS, [*asked, told(answer("second", id="x"))])
        assert found.before is conversations[min(conversations)]

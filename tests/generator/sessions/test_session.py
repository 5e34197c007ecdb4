"""Sessions: which tokens an agent's requests go on after, and what of its conversations is trained on."""

import asyncio
import gc
import itertools
import json
import random
import re
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from replay_generator import RolloutError
from replay_generator.engines import Completion, SamplingConfig
from replay_generator.rollouts.rollout import RolloutPolicy, RolloutSequence, Task
from replay_generator.rollouts.sessions.parsers import Parsers
from replay_generator.rollouts.sessions.session import Session
from replay_generator.rollouts.sessions.turns import Answer, Ask, Refusal
from replay_generator.testing import EOS, ScriptedEngine
from tests.generator.environments import test_tool_loop
from tests.generator.environments.test_tool_loop import FORGETS, TEMPLATE


def chat_tokenizer(template: str = TEMPLATE) -> Any:
    tokenizer = test_tool_loop.chat_tokenizer(template)
    tokenizer.backend_tokenizer.decoder = decoders.Fuse()
    return tokenizer


SAMPLING = SamplingConfig(max_tokens=100)


@dataclass
class Drawing(ScriptedEngine):
    """Draws what `says` says, or letters by chance, each with a log-probability and a version of its own."""

    tokenizer: Any = field(default_factory=chat_tokenizer)
    max_length: int = 10_000
    says: list[str] = field(default_factory=list)
    drawn: list[tuple[list[int], Completion]] = field(default_factory=list)
    """Each completion, with the tokens before it."""
    holds: asyncio.Event | None = None

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingConfig, n: int, *_: Any) -> list[Completion]:
        if self.holds is not None:
            await self.holds.wait()
        return [self._one(list(prompt_ids)) for _ in range(n)]

    def _one(self, prompt_ids: list[int]) -> Completion:
        count, text = len(self.drawn), self.text_of(prompt_ids)
        ids = [*self.tokenizer.encode(text), EOS]
        numbers = random.Random(-count)
        logprobs = [-numbers.random() for _ in ids]
        extras = {"routed": _array(count, len(ids))}
        completion = Completion(ids, logprobs, text, "stop", [count] * len(ids), extras=extras)
        self.drawn.append((prompt_ids, completion))
        return completion

    def text_of(self, prompt_ids: list[int]) -> str:
        count = len(self.drawn)
        return self.says[count] if count < len(self.says) else "".join(random.Random(count).choices("ab c", k=4))


def _array(seed: int, size: int) -> Any:
    import numpy as np

    return np.random.default_rng(seed).integers(0, 99, size)


def session_of(engine: Drawing, *, parsers: Parsers | None = None, bounds: Any = None, **fields: Any) -> Session:
    ids = engine.tokenizer.encode("go")
    given = {"row": {}, "messages": None, "index": 0, "sampling": SAMPLING, "max_length": engine.max_length}
    task = Task("p", ids, tokenizer=engine.tokenizer, **(given | fields))
    return Session(task, RolloutPolicy(engine, task.sampling, []), parsers or Parsers(), **(bounds or {}))


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def said(answer: Answer) -> dict[str, str]:
    return {"role": "assistant", "content": answer.text}


_numbers = itertools.count()


async def ask(session: Session, *messages: Any, read: bool = True, **fields: Any) -> Answer:
    answer = await session.ask(Ask(messages, **fields), str(next(_numbers)).encode())
    if read:
        session.delivered(answer)
    return answer


def words(engine: Drawing, ids: Sequence[int]) -> str:
    return "".join(engine.tokenizer.convert_ids_to_tokens(ids))


def assert_drawn(engine: Drawing, sequences: Sequence[RolloutSequence], trained: Sequence[Completion]) -> None:
    """What is trained on are the completions of the engine after the tokens that it drew them after, each once."""
    found = []
    for sequence in sequences:
        at = 0
        for turn in sequence.turns:
            if turn.role == "assistant":
                part = slice(at, at + turn.tokens)
                drawn = sequence.token_ids[part], sequence.logprobs[part], sequence.policy_versions[part]
                (same,) = (
                    each
                    for prompt, each in engine.drawn
                    if prompt == sequence.token_ids[:at]
                    and (each.token_ids, each.logprobs, each.policy_versions) == drawn
                )
                assert all(sequence.sampled_mask[part])
                extras = next(extras for start, extras, _ in sequence.drawn if start == at)
                assert (extras["routed"] == same.extras["routed"]).all()
                found.append(same)
            else:
                assert not any(sequence.sampled_mask[at : at + turn.tokens])
            at += turn.tokens
    assert sorted(map(id, found)) == sorted(map(id, trained))


async def test_a_conversation_goes_on_after_the_tokens_as_they_were_drawn():
    engine = Drawing(says=["first ", "second"])
    session = session_of(engine)
    one = await ask(session, user("a"))
    await ask(session, user("a"), said(one), user("b"))
    (sequence,) = session.rollout(1.0).sequences
    begin = "<s>user\na<e>\n<s>assistant\n"
    assert words(engine, sequence.token_ids) == f"{begin}first <e>\n<s>user\nb<e>\n<s>assistant\nsecond<e>"
    assert [turn.role for turn in sequence.turns] == ["prompt", "assistant", "user", "assistant"]
    assert_drawn(engine, [sequence], [each for _, each in engine.drawn])


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ([user("a"), {"role": "assistant", "content": "edited"}, user("b")], "the agent edited an answer"),
        ([user("summary of it"), user("b")], "the agent compacted its history"),
        ([{"role": "system", "content": "be brief"}, user("a"), user("b")], "another system prompt"),
    ],
)
async def test_a_history_that_nobody_was_answered_begins_a_sequence_of_its_own(changed, why):
    engine = Drawing()
    session = session_of(engine)
    await ask(session, user("a"))
    await ask(session, *changed)
    sequences = session.rollout(1.0).sequences
    assert len(sequences) == 2, why
    assert_drawn(engine, sequences, [each for _, each in engine.drawn])


async def test_a_template_that_rewrites_earlier_turns_gives_each_turn_a_sequence_with_its_context():
    engine = Drawing(tokenizer=chat_tokenizer(FORGETS), says=["one", "two"])
    session = session_of(engine)
    one = await ask(session, user("a"))
    await ask(session, user("a"), said(one), user("b"))
    sequences = session.rollout(1.0).sequences
    assert [words(engine, each.token_ids[: each.head]) for each in sequences] == [
        "<s>user\na<e>\n<s>assistant\n",
        "<s>user\n<e>\n<s>assistant\n<e>\n<s>user\nb<e>\n<s>assistant\n",
    ]
    assert_drawn(engine, sequences, [each for _, each in engine.drawn])


ONE_SYSTEM = TEMPLATE.replace(
    "{% for message in messages %}",
    "{% for message in messages %}{% if message['role'] == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}",
)


async def test_a_conversation_with_messages_of_the_system_all_over_it_is_one_sequence():
    engine = Drawing(tokenizer=chat_tokenizer(ONE_SYSTEM), says=["one", "two", "three"])
    session = session_of(engine)
    system = [{"role": "system", "content": text} for text in "pqrs"]
    talk: list[Any] = [system[0], system[1], user("a"), system[2]]
    for new in ([user("b"), system[3]], [system[0], user("c")], []):
        talk.append(said(await ask(session, *talk)))
        talk += new
    (sequence,) = session.rollout(1.0).sequences
    assert "<s>system\np\n\nq<e>\n<s>user\na\n\nr<e>\n" in words(engine, sequence.token_ids)
    assert "<s>user\nb\n\ns<e>\n<s>assistant\ntwo<e>\n<s>user\np\n\nc<e>\n" in words(engine, sequence.token_ids)
    assert_drawn(engine, [sequence], [each for _, each in engine.drawn])


async def test_a_conversation_that_ends_with_our_own_answer_is_continued_by_one_more_turn():
    engine = Drawing(says=["one", "two", "three"])
    session = session_of(engine)
    talk: list[Any] = [user("a")]
    for new in ([], [user("b")], []):
        talk.append(said(await ask(session, *talk)))
        talk += new
    (sequence,) = session.rollout(1.0).sequences
    begin = "<s>user\na<e>\n<s>assistant\none<e>\n<s>assistant\ntwo<e>\n<s>user\nb<e>\n<s>assistant\nthree<e>"
    assert words(engine, sequence.token_ids) == begin
    assert_drawn(engine, [sequence], [each for _, each in engine.drawn])


async def test_sub_agents_that_share_a_beginning_are_sequences_that_train_a_shared_turn_once():
    engine = Drawing(says=["plan", "left", "right", "end"])
    session = session_of(engine)
    plan = await ask(session, user("a"))
    shared = [user("a"), said(plan)]
    left, _ = await asyncio.gather(ask(session, *shared, user("l")), ask(session, *shared, user("r")))
    await ask(session, *shared, user("l"), said(left), user("more"))
    rollout = session.rollout(1.0)
    assert [[turn.role for turn in each.turns] for each in rollout.sequences] == [
        ["prompt", "earlier", "user", "assistant"],
        ["prompt", "assistant", "user", "assistant", "user", "assistant"],
    ] or [[turn.role for turn in each.turns] for each in rollout.sequences] == [
        ["prompt", "assistant", "user", "assistant"],
        ["prompt", "earlier", "user", "assistant", "user", "assistant"],
    ]
    assert_drawn(engine, rollout.sequences, [each for _, each in engine.drawn])
    assert rollout.text == "end"


async def test_of_equal_answers_the_oldest_that_nobody_follows_goes_on():
    engine = Drawing(says=["same", "same", "x", "y"])
    session = session_of(engine)
    one, two = await asyncio.gather(ask(session, user("a")), ask(session, user("a")))
    assert one.text == two.text
    await asyncio.gather(*(ask(session, user("a"), said(one), user(text)) for text in "xy"))
    sequences = session.rollout(1.0).sequences
    assert [len(each.turns) for each in sequences] == [4, 4]
    assert_drawn(engine, sequences, [each for _, each in engine.drawn])


async def test_a_retry_gets_the_answer_of_the_first_and_an_equal_request_another():
    engine = Drawing()
    session = session_of(engine)
    request = Ask([user("a")])
    first = await session.ask(request, b"a")
    assert await session.ask(request, b"a", repeated=True) is first
    assert await session.ask(request, b"a") is not first
    assert len(engine.drawn) == 2


async def test_a_client_that_hangs_up_does_not_end_the_turn_that_its_retry_waits_for():
    engine = Drawing(holds=asyncio.Event())
    session = session_of(engine)
    gone = asyncio.create_task(session.ask(Ask([user("a")]), b"a"))
    await asyncio.sleep(0.05)
    gone.cancel()
    again = asyncio.create_task(session.ask(Ask([user("a")]), b"a", repeated=True))
    await asyncio.sleep(0.05)
    engine.holds.set()
    assert (await again).text == engine.drawn[0][1].text
    assert len(engine.drawn) == 1


async def test_a_session_that_ends_refuses_and_ends_what_is_under_way():
    engine = Drawing(holds=asyncio.Event())
    session = session_of(engine)
    waiting = asyncio.create_task(session.ask(Ask([user("a")]), b"a"))
    await asyncio.sleep(0.05)
    await session.close()
    for refused in (waiting, session.ask(Ask([user("a")]), b"b")):
        with pytest.raises(Refusal, match="the session has ended") as caught:
            await refused
        assert caught.value.status == 410
    with pytest.raises(RolloutError, match="asked the policy for nothing: its address is in OPENAI_BASE_URL"):
        session.rollout(1.0)


async def test_a_text_of_stop_ends_the_turn_with_the_token_that_completes_it():
    engine = Drawing(says=["think END more", "done"])
    session = session_of(engine)
    one = await ask(session, user("a"), stop=["more", "END"])
    assert one.text == "think "
    assert one.finish_reason == "stop"
    assert one.stopped_by == "END"
    assert one.completion_tokens == 9
    await ask(session, user("a"), said(one), user("b"))
    (sequence,) = session.rollout(1.0).sequences
    drawn = engine.drawn[0][1]
    assert words(engine, sequence.token_ids[sequence.head :]).startswith("think END<e>\n<s>user\nb")
    assert sequence.logprobs[sequence.head :][:9] == drawn.logprobs[:9]
    assert (sequence.drawn[0][1]["routed"] == drawn.extras["routed"][:9]).all()


async def test_a_text_prompt_with_half_a_surrogate_is_refused_at_its_beginning_and_where_it_goes_on():
    session = session_of(Drawing(says=["one"]))
    session.delivered(await session.ask(Ask(prompt="say "), b"1"))
    for prompt in ("say \ud800", "say one<e>\ud800"):
        with pytest.raises(Refusal, match="the text holds half of a surrogate pair"):
            await session.ask(Ask(prompt=prompt), prompt.encode(errors="surrogatepass"))
    assert len(session.answers) == 1


async def test_a_text_prompt_goes_on_after_the_tokens_of_the_one_that_it_begins_with():
    engine = Drawing(says=["one", "two", "three"])
    session = session_of(engine)
    first = await session.ask(Ask(prompt="say "), b"1")
    session.delivered(first)
    session.delivered(await session.ask(Ask(prompt="say one<e>and "), b"2"))
    session.delivered(await session.ask(Ask(prompt=[*engine.tokenizer.encode("say one"), EOS, 5]), b"3"))
    sequences = session.rollout(1.0).sequences
    assert [words(engine, each.token_ids) for each in sequences] == ["say one<e>and two<e>", "say one<e>!three<e>"]
    assert_drawn(engine, sequences, [each for _, each in engine.drawn])


async def test_a_full_context_is_refused_in_words_and_the_rollout_ends_for_its_length():
    engine = Drawing(max_length=60)
    session = session_of(engine)
    await ask(session, user("a"))
    with pytest.raises(Refusal, match="has 119 tokens, and the model takes 60 tokens") as caught:
        await ask(session, user("b" * 100))
    assert caught.value.code == "context_length_exceeded"
    assert session.rollout(1.0).finish_reason == "length"


async def test_a_text_that_cannot_fit_is_refused_and_nobody_tokenizes_it():
    engine = Drawing(max_length=60)
    session = session_of(engine)
    long = "b" * (60 * 128 + 1)
    tool = {"type": "function", "function": {"name": "f", "description": long}}
    engine.tokenizer.encode = None  # type: ignore[assignment]
    for request in (
        Ask([user(long)]),
        Ask([user("a"), {"role": "tool", "tool_call_id": "c", "content": long}]),
        Ask([user("a")], tools=[tool]),
        Ask(prompt=long),
        Ask(prompt=[5] * 60),
    ):
        with pytest.raises(Refusal, match="the model takes 60 tokens") as counted:
            await session.count(request)
        assert counted.value.code == "context_length_exceeded"


async def test_a_tokenizer_with_longer_tokens_takes_longer_texts():
    engine = Drawing(max_length=60)
    engine.tokenizer.add_tokens(["b" * 1000])
    assert await session_of(engine).count(Ask([user("b" * 10_000)])) < 60


TITLES = {"untrained_models": ("titles",)}


async def test_a_turn_of_an_untrained_model_is_answered_and_not_trained_on():
    engine = Drawing(says=["one", "a title", "two"])
    session = session_of(engine, bounds=TITLES)
    first = await ask(session, user("a"), model="policy")
    title = await ask(session, user("Write a title for: a"), model="titles")
    await ask(session, user("a"), said(first), user("b"), model="policy")
    assert title.text == "a title"
    sequences = session.rollout(1.0).sequences
    assert len(sequences) == 1
    assert_drawn(engine, sequences, [engine.drawn[0][1], engine.drawn[2][1]])


async def test_what_goes_on_after_a_turn_of_an_untrained_model_has_it_as_context():
    engine = Drawing(says=["a plan", "done"])
    session = session_of(engine, bounds=TITLES)
    plan = await ask(session, user("a"), model="titles")
    await ask(session, user("a"), said(plan), user("b"), model="policy")
    (sequence,) = session.rollout(1.0).sequences
    assert [turn.role for turn in sequence.turns] == ["prompt", "untrained", "user", "assistant"]
    assert_drawn(engine, [sequence], [engine.drawn[1][1]])


@pytest.mark.parametrize("refusals", [0, 1])
async def test_a_rollout_of_untrained_models_alone_has_nothing_to_train_on(refusals):
    session = session_of(Drawing(), bounds=TITLES)
    await ask(session, user("a"), model="titles")
    for _ in range(refusals):
        session.refused(Refusal("n is not served", field="n"))
    with pytest.raises(RolloutError, match="has read no answer but those of untrained_models"):
        session.rollout(1.0)


async def test_an_agent_that_reads_no_answer_is_told_so():
    session = session_of(Drawing())
    await ask(session, user("a"), read=False)
    with pytest.raises(RolloutError, match="has read no answer: it hung up before each was sent"):
        session.rollout(1.0)


@pytest.mark.parametrize(
    ("bounds", "name"),
    [({"most_turns": 2}, "max_session_turns"), ({"most_bytes": 10_000}, "max_session_bytes")],
)
async def test_a_session_that_has_enough_refuses_further_turns_and_ends_for_its_length(bounds, name):
    engine = Drawing(says=["x"] * 9)
    session = session_of(engine, bounds=bounds)
    await ask(session, user("a"))
    refusals = []
    for _ in range(8):
        try:
            await ask(session, user("b"))
        except Refusal as refusal:
            refusals.append(refusal)
    assert 0 < len(refusals) < 8
    assert {each.status for each in refusals} == {400}
    assert f"the generator's {name} is" in str(refusals[0])
    assert len(engine.drawn) == 9 - len(refusals)
    assert session.rollout(1.0).finish_reason == "length"


@pytest.mark.parametrize(
    ("bounds", "name"),
    [({"most_turns": 2}, "max_session_turns"), ({"most_bytes": 7_000}, "max_session_bytes")],
)
async def test_completions_of_a_client_that_makes_tokens_itself_count_towards_the_bounds(bounds, name):
    engine = Drawing(says=["x"] * 9)
    session = session_of(engine, bounds=bounds)
    prompt = engine.tokenizer.encode("go")
    refusals = []
    for _ in range(9):
        try:
            await session.draw(Ask(prompt=prompt))
        except Refusal as refusal:
            refusals.append(str(refusal))
    assert 0 < len(refusals) < 9
    assert f"the generator's {name} is" in refusals[0]
    assert len(engine.drawn) == 9 - len(refusals)
    assert session.context_full


@pytest.mark.parametrize("text", ["four", "четы", "四四四四"])
async def test_a_text_counts_with_its_bytes_and_not_with_its_characters(text):
    session = session_of(Drawing(), bounds={"most_bytes": 1})
    request = Ask([user(text)])
    tokens = await session.count(request) + session.task.sampling.max_tokens
    nbytes = len(text.encode())
    with pytest.raises(Refusal, match=f"this turn needs {nbytes + 64 * tokens}:"):
        await ask(session, user(text))


async def test_a_turn_that_failed_takes_nothing_of_the_bounds():
    engine = Drawing(says=["x"])
    session = session_of(engine, bounds={"most_turns": 1})
    generate = engine.generate
    engine.generate = None  # type: ignore[assignment]
    with pytest.raises(TypeError):
        await ask(session, user("a"))
    engine.generate = generate  # type: ignore[method-assign]
    assert (await ask(session, user("a"))).text == "x"


@pytest.mark.parametrize("kind", ["too long", "refused"])
async def test_a_request_that_was_refused_is_kept_by_nobody(kind):
    engine = Drawing(max_length=60)
    session = session_of(engine)
    request = Ask([user("b" * 100 if kind == "too long" else "a")])
    if kind == "refused":
        request = Ask(request.messages, sampling={"temperature": 0.5})
    kept = weakref.ref(request)
    try:
        await session.ask(request, b"a")
    except Refusal as refusal:
        session.refused(refusal)
    del request
    await asyncio.sleep(0)
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"sampling": {"temperature": 0.5}}, "temperature 0.5 is not that of the generator, 1.0, .* leave it out"),
        ({"sampling": {"top_p": 0.9}}, "top_p 0.9 is not that of the generator, 1.0"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "has tools: start the generator with --tool-pa"),
        ({"messages": [{"role": "assistant", "content": "I"}]}, "ends with words of the assistant"),
    ],
)
async def test_what_cannot_be_served_honestly_is_refused(fields, why):
    with pytest.raises(Refusal, match=why):
        await session_of(Drawing()).ask(Ask(**({"messages": [user("a")]} | fields)), b"")


async def test_temperature_and_top_p_of_the_generator_itself_are_no_reason_to_refuse():
    await ask(session_of(Drawing()), user("a"), sampling={"temperature": 1, "top_p": 1.0})


CALL = '<tool_call>\n{"name": "add", "arguments": {"b": 3, "a": 2}}\n</tool_call>'
TOOLS = ({"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}},)


async def test_calls_are_those_that_the_parser_of_vllm_finds_and_their_answers_go_on_after_the_drawn_tokens():
    engine = Drawing(says=[f"Let me see.{CALL}", "5"])
    session = session_of(engine, parsers=Parsers("hermes"))
    one = await ask(session, user("2+3"), tools=TOOLS)
    (call,) = one.calls
    assert one.text == "Let me see."
    assert call.name == "add"
    assert json.loads(call.arguments) == {"a": 2, "b": 3}
    function = {"name": "add", "arguments": {"a": 2, "b": 3}}
    echoed = {"role": "assistant", "content": "Let me see.", "tool_calls": [{"id": call.id, "function": function}]}
    answer = {"role": "tool", "tool_call_id": call.id, "content": "5"}
    await ask(session, user("2+3"), echoed, answer, tools=TOOLS)
    (sequence,) = session.rollout(1.0).sequences
    assert f"{CALL}<e>\n<s>tool\n5<e>\n<s>assistant\n5<e>" in words(engine, sequence.token_ids)
    assert_drawn(engine, [sequence], [each for _, each in engine.drawn])


async def test_thoughts_are_those_that_the_parser_of_vllm_finds():
    engine = Drawing(says=["<think>hm</think>yes"])
    # Any tokenizer of a model that thinks has these tokens.
    engine.tokenizer.add_tokens(["<think>", "</think>"])
    session = session_of(engine, parsers=Parsers(None, "deepseek_r1"))
    answer = await ask(session, user("a"))
    assert answer.reasoning == "hm"
    assert answer.text == "yes"


@pytest.mark.parametrize("option", ["tool_parser", "reasoning_parser"])
def test_an_unknown_parser_is_refused_with_the_names_that_there_are(option):
    with pytest.raises(ValueError, match=f"{option} 'klingon' is none of vLLM's: .*qwen3"):
        Parsers(**{option: "klingon"})


@pytest.mark.parametrize("names", [{"tool_parser": "openai"}, {"reasoning_parser": "openai_gptoss"}])
def test_a_parser_that_vllm_takes_by_the_model_alone_is_refused_at_the_start(names):
    with pytest.raises(
        ValueError, match=f"{next(iter(names))} '{next(iter(names.values()))}' is not served: .*Harmony"
    ):
        Parsers(**names)


async def test_a_parser_that_does_not_fit_the_tokenizer_is_refused_before_anything_is_drawn():
    engine = Drawing()
    with pytest.raises(Refusal, match=r"does not fit the tokenizer: RuntimeError: DeepSeek.* start the generator with"):
        await ask(session_of(engine, parsers=Parsers("deepseek_v3")), user("a"), tools=TOOLS)
    assert engine.drawn == []


class Numbered(Drawing):
    """Each text has the number of its completion in the middle."""

    def text_of(self, prompt_ids: list[int]) -> str:
        text = super().text_of(prompt_ids)
        return f"{text[:2]}{len(self.drawn)}{text[2:]}"


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_whatever_agents_ask_each_turn_that_they_read_is_trained_on_once_as_it_was_drawn(data):
    async def play() -> None:
        engine = Numbered(tokenizer=chat_tokenizer(data.draw(st.sampled_from([TEMPLATE, FORGETS]))))
        session = session_of(engine)
        conversations: list[list[Any]] = [[]]
        trained: list[Completion] = []
        for _ in range(data.draw(st.integers(1, 8))):
            at_once = data.draw(st.integers(1, 3))
            begun = [data.draw(st.sampled_from(conversations)) for _ in range(at_once)]
            asked = [[*each, user(data.draw(st.sampled_from(["x", "y", " "])))] for each in begun]
            answers = await asyncio.gather(*(ask(session, *each, read=False) for each in asked))
            for messages, answer in zip(asked, answers, strict=True):
                (number,) = re.findall(r"\d+", answer.text)
                _, drawn = engine.drawn[int(number)]
                if data.draw(st.integers(0, 3)):
                    session.delivered(answer)
                    trained.append(drawn)
                    conversations.append([*messages, said(answer)])
        if trained:
            assert_drawn(engine, session.rollout(1.0).sequences, trained)

    asyncio.run(play())

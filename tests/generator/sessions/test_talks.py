"""Random conversations of real clients in all protocols: what they are trained on is what the engine drew."""

from __future__ import annotations

import asyncio
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay_generator.engines import Completion, SamplingConfig
from replay_generator.rollouts.sessions.endpoint import SessionServer
from replay_generator.rollouts.sessions.parsers import Parsers
from tests.generator.sessions.fakes import of_anthropic, of_openai
from tests.generator.sessions.talks import KINDS, MessagesTalk, Talk
from tests.generator.sessions.test_session import Drawing, ask, assert_drawn, said, session_of, user
from tests.generator.sessions.test_slips import SLIPS, hermes

OBJECTS = ['{"a": 1}', '{"a": 100.0, "b": [2.5, "x y", null]}', "{}"]
TURNS = [
    ["yes"],
    ["", "yes"],
    [hermes(OBJECTS[0])],
    ["Let me see. ", hermes(OBJECTS[1])],
    [hermes(OBJECTS[0]), hermes(OBJECTS[1]), hermes(OBJECTS[2])],
    *([hermes(slip)] for slip in SLIPS.values()),
    [hermes(OBJECTS[1]), hermes(SLIPS["a list"])],
]
"""What the policy writes in a turn, in parts: texts, calls, and calls that are none."""


def the_turn(data: st.DataObject) -> str:
    thoughts = data.draw(st.sampled_from(["", "<think>hm</think>", "<think>so</think>"]))
    return thoughts + "".join(data.draw(st.sampled_from(TURNS)))


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_whatever_agents_play_in_any_protocol_each_turn_is_trained_on_as_it_was_drawn(data):
    async def play() -> None:
        engine = Drawing(max_length=100_000)
        engine.tokenizer.add_tokens(["<think>", "</think>"])
        parsers = Parsers("hermes", "deepseek_r1")
        session = session_of(engine, parsers=parsers, sampling=SamplingConfig(max_tokens=20_000))
        # By the number of a draw: the one that it goes on after; None: none. Each is in one sequence or more.
        before: list[int | None] = []
        newest: dict[int, int | None] = {}
        async with SessionServer() as server:
            address = server.open(session)
            async with of_openai(address) as openai, of_anthropic(address) as anthropic:
                talks: list[Talk] = []
                for turn in range(data.draw(st.integers(1, 7))):
                    choice = data.draw(st.sampled_from(["go on", "go on", "begin", "fork", "change"]))
                    if choice == "begin" or not talks:
                        kind = data.draw(st.sampled_from(list(KINDS.values())))
                        client = anthropic if kind is MessagesTalk else openai
                        talk = kind(client, ["add"], stream=data.draw(st.booleans()))
                        talks.append(talk)
                        newest[id(talk)] = None
                        talk.user(f"begin {turn}")
                    elif choice == "fork":
                        one = data.draw(st.sampled_from(talks))
                        talk = one.copied()
                        talks.append(talk)
                        newest[id(talk)] = newest[id(one)]
                    else:
                        talk = data.draw(st.sampled_from(talks))
                    if talk.calls:
                        results = [(id, f"result {turn}") for id, _ in talk.calls]
                        talk.results(data.draw(st.permutations(results)))
                    else:
                        talk.user(f"go on {turn}")
                    if choice == "change":
                        talk.history[0] = {"role": "user", "content": f"changed {turn}"}
                        newest[id(talk)] = None
                    engine.says.append(the_turn(data))
                    await talk.ask()
                    talk.rewrite(
                        spells_numbers=data.draw(st.booleans()),
                        drops_thoughts=data.draw(st.booleans()),
                        drops_text=data.draw(st.booleans()),
                    )
                    before.append(newest[id(talk)])
                    newest[id(talk)] = len(before) - 1
        sequences = session.rollout(1.0).sequences
        assert_drawn(engine, sequences, [each for _, each in engine.drawn])
        assert len(sequences) == len(set(range(len(before))) - set(before))

    asyncio.run(play())


async def test_a_session_takes_memory_in_proportion_to_its_tokens():
    async def bytes_of(turns: int) -> int:
        engine = Drawing(says=["yes"] * turns, max_length=10**6)
        session = session_of(engine)
        messages: list[Any] = []
        tracemalloc.start()
        for number in range(turns):
            messages.append(user(f"go on {number}"))
            messages.append(said(await ask(session, *messages)))
            engine.drawn.clear()
        (sequence,) = session.rollout(1.0).sequences
        used, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert len(sequence.turns) == 2 * turns
        return used

    few = await bytes_of(20)
    assert await bytes_of(160) < 12 * few


@pytest.mark.long
async def test_a_session_of_a_thousand_turns_is_one_sequence_of_all_of_them():
    turns = 1200
    engine = Drawing(says=[f"turn {number}" for number in range(turns)], max_length=10**6)
    session = session_of(engine)
    messages: list[Any] = []
    drawn: list[Completion] = []
    for number in range(turns):
        messages.append(user(f"go on {number}"))
        messages.append(said(await ask(session, *messages)))
        drawn.append(engine.drawn[-1][1])
    (sequence,) = session.rollout(1.0).sequences
    mask = sequence.sampled_mask
    trained = [token for token, is_drawn in zip(sequence.token_ids, mask, strict=True) if is_drawn]
    assert trained == [token for each in drawn for token in each.token_ids]
    assert len(sequence.turns) == 2 * turns

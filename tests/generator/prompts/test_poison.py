"""Items of `prompts` and `partial_groups` that nobody can make a group of stop no generator: they are rejected."""

import asyncio
from dataclasses import replace

import msgpack
import numpy as np
import pytest

from replay_client.columns import encode_arrays
from replay_client.errors import ReplayError
from replay_client.testing import async_until, make_group
from replay_generator import Rollout, RolloutSequence
from replay_generator.config import MOST_ROLLOUTS
from replay_generator.engines import Completion, SamplingConfig
from replay_generator.errors import PromptError
from replay_generator.groups.codec import PARTIAL_GROUP_MAGIC, PartialGroupSpec, encode_rollout
from replay_generator.prompts import table as prompts_table
from replay_generator.prompts.prompt import Prompt, epoch_order
from replay_generator.prompts.stored import MAGIC, PromptCursor, StoredPrompt, decode_item
from replay_generator.rollouts.rollout import PlayedRollout
from replay_generator.testing import Letters, ScriptedEngine
from tests.kit.engines import SAID
from tests.kit.generators import make_prompts
from tests.kit.prompts import CURRICULUM, EPOCH, PARTIAL_GROUPS, held, made, make_curriculum, make_epoch, names
from tests.kit.servers import async_serving

PROMPT = Prompt("odd", "1+1=", {"prompt": "1+1="})
TOLD = {"prompt_id": "odd", "content": "1+1=", "row": {}, "tags": {}}
FIELDS = {"prompt": msgpack.packb(TOLD), "epoch": 0, "position": 0}
CURSOR = vars(PromptCursor(1, 0, 10, "names"))
OPENING = PartialGroupSpec(1, PROMPT, [5, 6], 0, 3, SamplingConfig())
NESTED = b"\x91" * 5000
LONG = "1" * 500


class KnownLetters(Letters):
    """A tokenizer that says how many tokens it has."""

    def __len__(self) -> int:
        return 1000


def stored(**fields):
    prompt = msgpack.packb(TOLD | {name: fields.pop(name) for name in TOLD if name in fields})
    return MAGIC + msgpack.packb(FIELDS | {"prompt": prompt} | fields)


def cursor_with(**fields):
    return MAGIC + msgpack.packb({"cursor": CURSOR | fields})


def spec(**fields):
    return replace(OPENING, **fields).encode()


def told(given=(), dropped=(), ids=None, **told):
    """An spec with some fields of its header as they are given."""
    fields = {
        "key": 1,
        "prompt": msgpack.packb(TOLD),
        "number": 0,
        "group_size": 3,
        "sampling": {},
        "again": False,
        "item": None,
    }
    fields = {name: value for name, value in (fields | told).items() if name not in dropped}
    ids = np.array([5, 6], np.int32) if ids is None else ids
    return b"".join(encode_arrays(PARTIAL_GROUP_MAGIC, dict(given) or fields, {"prompt_ids": ids}, {}, {}))


def packed(**fields):
    return told(prompt=msgpack.packb(TOLD | fields))


def rolled(numbers=(0,), *, axis="group", cut=0, **changes):
    """Columns of rollouts, which are added to an spec; `changes` are those of the sequence and of the rollout."""
    sequence = RolloutSequence([5, 6])
    sequence.append_completion(Completion([7, 8], [-0.1, -0.2], "78", "stop", [0, 0], extras=changes.pop("extras", {})))
    for name in ("token_ids", "sampled_mask", "logprobs", "policy_versions", "turns"):
        if name in changes:
            setattr(sequence, name, changes.pop(name))
    column = encode_rollout(PlayedRollout.of(replace(Rollout([sequence]), **changes)))
    return {f"rollout/{number}": column[: column.size - cut] for number in numbers}


def bare(**fields):
    """A rollout whose header has these fields."""
    told = {"sequences": [], "reward": None, "finish_reason": "", "metrics": {}, "info": msgpack.packb({})} | fields
    return {"rollout/0": np.frombuffer(b"".join(encode_arrays(b"RPLYROL\x01", told, {}, {}, {})), np.uint8)}


PROMPTS = {
    "nothing": b"",
    "random bytes": bytes(range(200)),
    "a group": make_group().encode(),
    "another format": b"RPLYPRM\x09" + msgpack.packb(FIELDS),
    "no msgpack": MAGIC + b"\xc1",
    "cut off": stored()[:-3],
    "nested": MAGIC + NESTED,
    **{f"msgpack of {kind!r}": MAGIC + msgpack.packb(kind) for kind in (5, "cursor", None, ["cursor"], {})},
    "a field is missing": MAGIC + msgpack.packb({"content": "1+1="}),
    **{
        f"{name} {value!r:.20}": stored(**{name: value})
        for name, values in {
            "prompt_id": (7, None, ["x"]),
            "content": ("", [], 7, None, {"a": 1}, [{"role": "user"}], ["1"], [{"role": 3, "content": ""}]),
            "row": (None, 7, ["x"]),
            "tags": ({"a": 1.5}, {"": "x"}, {"a": "x" * 300}, {f"t{n}": n for n in range(9)}),
            "epoch": ("0", -1, None),
            "position": (2.5, [0]),
        }.items()
        for value in values
    },
    "too long": stored(content=LONG),
    "messages without a template": stored(content=[{"role": "user", "content": "x"}]),
    "a cursor of 5": MAGIC + msgpack.packb({"cursor": 5}),
    "a cursor of others": MAGIC + msgpack.packb({"cursor": {"run": 1}}),
    **{
        f"a cursor's {name}": cursor_with(**{name: value})
        for name, value in {"run": "1", "rows": -1, "epoch": 1.5}.items()
    },
    "a cursor behind the end": cursor_with(position=11),
}
SITES = {
    "nothing": b"",
    "random bytes": bytes(range(200)),
    "a group": make_group().encode(),
    "a prompt": stored(),
    "cut off": spec()[:-70],
    "nested": PARTIAL_GROUP_MAGIC + len(NESTED).to_bytes(8, "little") + NESTED + bytes(64),
    "no fields": told(given={"x": 1}),
    **{f"no {name}": told(dropped=[name]) for name in ("key", "prompt", "group_size", "sampling", "item")},
    **{
        f"{name} {value!r:.20}": told(**{name: value})
        for name, values in {
            "group_size": (0, -3, 30_000_000, MOST_ROLLOUTS + 1, "3", 2.5, None, True),
            "key": (-1, "1", None, 1.5),
            "number": ("0", None),
            "prompt": (5, b"\xc1", b""),
            "sampling": (5, {"x": 1}, {"temperature": "1"}, {"temperature": -1.0}, {"max_tokens": 0}, {"top_k": 2**63}),
            "item": (5, [1], ["k", 0.1, 0, 0], [1, "p", 0, 0], [1, float("nan"), 0, 0], [-1, 0.1, 0, 0]),
        }.items()
        for value in values
    },
    "prompt_id": packed(prompt_id=7),
    "content": packed(content=""),
    "row": packed(row=5),
    "tags": packed(tags={"a": [1]}),
    "too many tags": packed(tags={f"t{n}": n for n in range(9)}),
    "no prompt_ids": spec(prompt_ids=[]),
    "too many prompt_ids": spec(prompt_ids=[5] * 64),
    "prompt_ids outside the vocabulary": spec(prompt_ids=[5, 1_000_000]),
    "prompt_ids below 0": spec(prompt_ids=[5, -1]),
    "prompt_ids of floats": told(ids=np.array([5.5, 6], np.float32)),
    "prompt_ids of int64": told(ids=np.array([2**40], np.int64)),
    "prompt_ids in two dimensions": told(ids=np.array([[5], [6]], np.int32)),
}
ROLLOUTS = {
    "another number": {"rollout/x": rolled()["rollout/0"]},
    "a number below 0": rolled([-1]),
    "more rollouts than the group": rolled(range(4)),
    "another type": {"rollout/0": np.array([1.5, 2.5])},
    "an empty column": {"rollout/0": np.zeros(0, np.uint8)},
    "a truncated column": rolled(cut=64),
    "no sequences": bare(),
    "a sequence without arrays": bare(sequences=[{"turns": [], "finish_reason": "stop", "drawn": []}]),
    "info that is no dict": rolled(info=[1]),
    "a reward of NaN": rolled(reward=float("nan")),
    "an infinite reward": rolled(reward=float("inf")),
    "a huge reward": rolled(reward=1e30),
    "a reward of text": bare(sequences=[], reward="1"),
    "a metric of text": bare(metrics={"a": "b"}),
    "a reason that is a number": rolled(finish_reason=5),
    "fewer masks": rolled(sampled_mask=[False, False, True]),
    "fewer log-probabilities": rolled(logprobs=[np.nan, np.nan, -0.1]),
    "fewer versions": rolled(policy_versions=[0, 0]),
    "log-probabilities above 0": rolled(logprobs=[np.nan, np.nan, 5.0, 5.0]),
    "tokens below 0": rolled(token_ids=[5, 6, -7, 8]),
    "turns that are no text": rolled(
        turns=[*RolloutSequence([5]).turns, replace(RolloutSequence([5]).turns[0], text=5)]
    ),
    "nothing that the policy wrote": rolled(turns=RolloutSequence([5, 6, 7, 8]).turns),
    "extras that do not fit": rolled(extras={"hidden": np.zeros((9, 2), np.float32)}),
    "two that do not go together": rolled([0], extras={"hidden": np.zeros((2, 2), np.float32)})
    | rolled([1], extras={"hidden": np.zeros((2, 3), np.float32)}),
}


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(prompts_table, "_PAUSE", 0.05)


def engine():
    return ScriptedEngine(tokenizer=KnownLetters(), completions=[SAID])


async def check_rejected(client, generator, caplog, key, table, expected):
    """The run ends with all groups; the item is named once, counted, and gone."""
    await generator.run()
    assert sorted(await made(client)) == sorted(expected.elements())
    lines = [record.message for record in caplog.records if "rejected" in record.message]
    assert len(lines) == 1
    assert lines[0].startswith(f"item {key} of table {table!r} is rejected: ")
    assert generator.stats["items_rejected"] == 1
    assert not await client.get([key])


@pytest.mark.parametrize("shape", PROMPTS)
async def test_an_item_that_is_no_prompt_is_rejected(shape, caplog):
    async with async_serving(EPOCH) as client:
        if shape in ("a group", "too long", "messages without a template"):  # behind others; the rest comes first
            await make_epoch(client, max_groups=0, engine=engine()).run()
        key = await client.insert(PROMPTS[shape], {"prompts": 1.0})
        await check_rejected(client, make_epoch(client, engine=engine()), caplog, key, "prompts", names(10))


@pytest.mark.parametrize("shape", ["random bytes", "content ''", "too long"])
async def test_an_item_that_a_curriculum_would_draw_again_and_again_is_taken_out(shape, caplog):
    async with async_serving(CURRICULUM) as client:
        await make_curriculum(client, 1, max_groups=1, engine=engine()).run()
        key = await client.insert(PROMPTS[shape], {"prompts": 1e9})
        generator = make_curriculum(client, 1, max_groups=2, engine=engine())
        await check_rejected(client, generator, caplog, key, "prompts", names(1, 3))


@pytest.mark.parametrize("shape", [*SITES, *ROLLOUTS])
async def test_an_item_that_is_no_group_under_construction_is_rejected(shape, caplog):
    async with async_serving([*EPOCH, PARTIAL_GROUPS]) as client:
        key = await client.insert(SITES.get(shape, OPENING.encode()), {"partial_groups": 1.0})
        for name, column in ROLLOUTS.get(shape, {}).items():
            await client.extend(key, {name: column}, axes={name: "group"})
        generator = make_epoch(client, engine=engine(), partial_groups_table="partial_groups")
        await check_rejected(client, generator, caplog, key, "partial_groups", names(10))


async def test_what_is_no_rollout_beside_an_opening_does_not_matter():
    async with async_serving([*EPOCH, PARTIAL_GROUPS]) as client:
        key = await client.insert(OPENING.encode(), {"partial_groups": 1.0})
        await client.extend(key, {"values": np.zeros(3), **rolled([1])})
        generator = make_epoch(client, engine=engine(), partial_groups_table="partial_groups")
        await generator.run()
        assert sorted(await made(client)) == sorted([*names(10), "odd"])
        assert generator.stats["groups_resumed"] == 1
        assert generator.stats["items_rejected"] == 0


async def test_rollouts_that_do_not_go_together_with_those_of_this_engine_are_rejected(caplog):
    own = Completion([7, 8], [-0.1, -0.2], "78", "stop", [], extras={"hidden": np.zeros((2, 2), np.float32)})
    async with async_serving([*EPOCH, PARTIAL_GROUPS]) as client:
        key = await client.insert(OPENING.encode(), {"partial_groups": 1.0})
        await client.extend(key, rolled(extras={"hidden": np.zeros((2, 3), np.float32)}))
        generator = make_epoch(
            client, engine=replace(engine(), completions=[own]), partial_groups_table="partial_groups"
        )
        await check_rejected(client, generator, caplog, key, "partial_groups", names(10))


async def test_prompts_of_a_later_window_are_made_even_if_none_of_the_first_one_fits():
    order = epoch_order(10, 0, 0).tolist()
    rows = make_prompts(10)
    for row in order[: prompts_table.WINDOW]:
        rows[row] = replace(rows[row], content=LONG)
    async with async_serving(EPOCH) as client:
        generator = make_epoch(client, rows, engine=engine())
        await generator.run()
        expected = [f"p{row}" for row in order[prompts_table.WINDOW :]]
        assert sorted(await made(client)) == sorted(expected)
        assert generator.stats["items_rejected"] == prompts_table.WINDOW


async def test_a_generator_waits_for_prompts_that_another_one_loads_even_if_none_has_fitted_so_far(monkeypatch):
    idle: list[None] = []
    look = prompts_table.EpochPrompts._table_is_idle

    async def noted(self):
        idle.append(None)
        await look(self)

    monkeypatch.setattr(prompts_table.EpochPrompts, "_table_is_idle", noted)
    rows = make_prompts(6)
    order = epoch_order(6, 0, 0).tolist()
    for row in order[:4]:
        rows[row] = replace(rows[row], content=LONG)
    async with async_serving(EPOCH) as client:
        await make_epoch(client, rows, max_groups=0, engine=engine()).run()  # inserts the cursor
        (cursor_item,) = await client.sample("prompts", lease=60.0)
        cursor = decode_item(cursor_item.payload)
        for position, row in enumerate(order[:4]):
            prompt = StoredPrompt(Prompt.of(rows[row]), 0, position)
            await client.insert(prompt.encode(), {"prompts": 1.0})
        generating = asyncio.create_task(make_epoch(client, rows, engine=engine()).run())
        await async_until(lambda: len(idle) > 1 or generating.done())
        for position, row in enumerate(order[4:], 4):
            prompt = StoredPrompt(Prompt.of(rows[row]), 0, position)
            await client.insert(prompt.encode(), {"prompts": 1.0})
        end = replace(cursor, epoch=1)
        await client.insert(end.encode(), {"prompts": 1.0}, closes=[cursor_item])
        await generating
        assert sorted(await made(client)) == sorted(f"p{row}" for row in order[4:])


async def test_where_nothing_fits_the_run_ends_and_most_stays_in_the_table():
    async with async_serving(EPOCH) as client:
        with pytest.raises(PromptError, match="has 500 tokens; the engine takes 1 to 63"):
            await make_epoch(client, [{"prompt": LONG}] * 3, engine=engine()).run()
        assert await held(client) == (4, 0)  # with the cursor
    async with async_serving(EPOCH) as client:
        for _ in range(300):
            await client.insert(b"foreign", {"prompts": 1.0})
        with pytest.raises(ReplayError, match="'prompts' holds other things than prompts"):
            await make_epoch(client).run()
        assert await held(client) == (200, 0)

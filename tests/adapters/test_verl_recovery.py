"""What finds verl's finished groups again: the names of fetches, the rows of a group, and what a checkpoint contains.

verl itself is not needed: test_verl_killed.py kills the real one.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from replay_adapters.occurrences import (
    MAX_CHECKPOINTS,
    Fetch,
    Occurrence,
    OccurrenceCounter,
    OccurrenceGroups,
    Recovery,
)
from replay_adapters.verl_rows import StoredRows, digest, group_of, rows_of
from replay_client import ReplayClient
from replay_client.testing import make_group
from replay_server import ReplayServer, TableConfig


@pytest.fixture(scope="module")
def client() -> Iterator[ReplayClient]:
    with ReplayServer([TableConfig(name="finished")], port=0) as server, ReplayClient(server.address) as client:
        yield client


@pytest.fixture
def run(request: pytest.FixtureRequest) -> str:
    """The name of a run that no other test has."""
    return str(request.node.name)


def groups_of(client: ReplayClient, run: str, settings: str = "") -> OccurrenceGroups:
    return OccurrenceGroups(client, "finished", run=run, settings=settings)


# ------------------------------------------------------------------------------------------------- names of fetches


def test_a_fetch_is_named_by_its_index_and_the_number_of_fetches_before_it():
    counter = OccurrenceCounter(0)
    assert [str(counter.next(index)) for index in ("7", "9", "7")] == ["7@0:0", "9@0:0", "7@0:1"]


def test_a_fetch_after_a_checkpoint_is_named_since_that_checkpoint_and_since_the_one_before():
    counter = OccurrenceCounter(10)
    counter.next("7")
    counter.saved(20)
    occurrence = counter.next("7")
    assert str(occurrence) == "7@20:0,10:1"
    assert occurrence.since(20) == 0
    assert occurrence.since(10) == 1
    assert occurrence.since(0) is None


def test_a_checkpoint_that_is_forgotten_names_no_fetch_any_more():
    counter = OccurrenceCounter(10)
    counter.saved(20)
    counter.forget_before(20)
    assert str(counter.next("7")) == "7@20:0"


def test_checkpoints_that_never_get_onto_the_disk_take_no_memory_without_bound():
    counter = OccurrenceCounter(0)
    for checkpoint in range(1, 20):
        counter.saved(checkpoint)
    assert len(counter.checkpoints) == MAX_CHECKPOINTS
    assert counter.checkpoints[-1] == 19


@pytest.mark.parametrize("step", [3, 4])
def test_a_checkpoint_that_is_not_after_the_last_one_is_refused(step):
    with pytest.raises(ValueError, match=f"the checkpoint of step {step} was written after that of step 4"):
        OccurrenceCounter(4).saved(step)


@pytest.mark.parametrize("text", ["7@0:0", "7@20:1,10:3", "a@b@20:1", "@0:0"])
def test_a_name_that_is_read_has_the_text_that_it_was_read_from(text):
    assert str(Occurrence.parse(text)) == text


@pytest.mark.parametrize("text", ["7", "7@", "7@x:0", "7@1", "7@1:2,"])
def test_a_text_that_names_no_fetch_is_refused(text):
    with pytest.raises(ValueError, match=re.escape(f"{text!r} does not name a fetch of a prompt")):
        Occurrence.parse(text)


# ------------------------------------------------------------------------------------------- what a run finds again


class Run:
    """A trainer of one prompt at a time, in the place of verl: it fetches, generates or finds, trains, and saves."""

    def __init__(self, client: ReplayClient, name: str, stream: list[str], state: dict[str, Any]) -> None:
        """`stream`: the indexes of the prompts in the order of the data set. `state`: the last checkpoint."""
        self._stream = stream
        self._state = state
        self.step = state["step"]
        self.trained: list[tuple[int, int]] = list(state["trained"])
        """(position in the stream, token of the group) of each group that was trained on."""
        self.generated = 0
        self.groups = groups_of(client, name)
        self.waiting: dict[str, tuple[int, Occurrence]] = dict(state["waiting"])
        """By uid: the position and the name of each prompt that was fetched and not trained on."""
        self.recovery = Recovery(self.groups, self.step, {uid: name for uid, (_, name) in self.waiting.items()})
        self.position = state["position"]
        self.finished: dict[str, int] = {}
        """By uid: the token of the group, for prompts that are waiting."""
        for uid, (position, _) in self.waiting.items():
            self._dispatch(uid, position)

    def fetch(self, count: int) -> None:
        for _ in range(count):
            self._dispatch(f"{id(self)}-{self.position}", self.position)
            self.position += 1

    def _dispatch(self, uid: str, position: int) -> None:
        fetch = self.recovery.next(uid, self._stream[position])
        self.waiting[uid] = (position, fetch.occurrence)
        if fetch.key is not None:
            [item] = self.groups.client.get([fetch.key])
            assert not fetch.renamed
            self.finished[uid] = int(item.group.completion_ids[0])

    def generate(self, uids: list[str]) -> None:
        for uid in uids:
            if uid not in self.finished:
                self.generated += 1
                self.finished[uid] = random.randint(0, 2**30)
                group = make_group(completions=[[self.finished[uid]]])
                assert self.groups.store(self.waiting[uid][1], group)

    def train(self) -> None:
        self.step += 1
        uid = min(self.finished, key=lambda uid: self.waiting[uid][0])
        position, _ = self.waiting.pop(uid)
        self.trained.append((position, self.finished.pop(uid)))

    def save(self) -> None:
        self._state |= {"step": self.step, "position": self.position, "trained": list(self.trained)}
        self._state["waiting"] = dict(self.waiting)
        self.recovery.saved(self.step, [name for _, name in self.waiting.values()], durable=self.step)


@pytest.mark.parametrize("ahead", [1, 4], ids=["sync", "async"])
@pytest.mark.parametrize("seed", range(3))
def test_a_run_that_is_killed_often_generates_no_stored_group_twice_and_trains_on_each_fetch_once(
    client, run, ahead, seed
):
    draw = random.Random(seed)
    stream = [str(index) for _ in range(20) for index in draw.sample(range(6), 6)]
    state: dict[str, Any] = {"step": 0, "position": 0, "trained": [], "waiting": {}}
    generated, positions = 0, 0
    while state["step"] < 60:
        trainer = Run(client, run, stream, state)
        for _ in range(draw.randint(3, 15)):
            trainer.fetch(max(0, ahead - len(trainer.waiting)))
            unfinished = [uid for uid in trainer.waiting if uid not in trainer.finished]
            trainer.generate(draw.sample(unfinished, draw.randint(0, len(unfinished))))
            trainer.generate(unfinished[:1])
            trainer.train()
            if trainer.step % 4 == 0:
                trainer.save()
        positions = max(positions, trainer.position)
        generated += trainer.generated
    assert [position for position, _ in sorted(state["trained"])] == sorted({p for p, _ in state["trained"]})
    assert len({token for _, token in state["trained"]}) == len(state["trained"])
    assert generated <= positions, "a stored group was generated again"


def test_a_run_finds_its_groups_by_the_fetches_since_the_checkpoint(client, run):
    first = Recovery(groups_of(client, run), 8)
    names = [first.next("u", index).occurrence for index in ("7", "9", "7")]
    for token, name in enumerate(names):
        first.groups.store(name, make_group(completions=[[token]]))
    again = Recovery(groups_of(client, run), 8)
    fetches = [again.next("v", index) for index in ("7", "7", "9", "7")]
    tokens = [None if fetch.key is None else token_of(client, fetch) for fetch in fetches]
    assert tokens == [0, 2, 1, None]


def token_of(client: ReplayClient, fetch: Fetch) -> int:
    assert fetch.key is not None
    [item] = client.get([fetch.key])
    return int(item.group.completion_ids[0])


def test_a_prompt_that_the_checkpoint_holds_is_found_under_the_name_that_it_has_there(client, run):
    first = Recovery(groups_of(client, run), 0)
    name = first.next("u", "7").occurrence
    first.saved(4, [name], durable=4)
    first.groups.store(name, make_group(completions=[[5]]))
    again = Recovery(groups_of(client, run), 4, {"u": name})
    assert token_of(client, again.next("u", "7")) == 5
    assert again.next("v", "7").key is None, "a fetch after the checkpoint"
    assert str(again.next("w", "7").occurrence) == "7@4:1", "the prompt of the checkpoint is not counted"


def test_a_run_that_falls_back_to_an_older_checkpoint_finds_the_groups_since_then(client, run):
    first = Recovery(groups_of(client, run), 4)
    names = [first.next("u", "7").occurrence]
    first.saved(8, [], durable=4)  # this one is still being written
    names.append(first.next("v", "7").occurrence)
    for token, name in enumerate(names):
        first.groups.store(name, make_group(completions=[[token]]))
    again = Recovery(groups_of(client, run), 4)
    fetches = [again.next("w", "7") for _ in range(2)]
    assert [token_of(client, fetch) for fetch in fetches] == [0, 1]
    assert [fetch.renamed for fetch in fetches] == [False, True]


def test_the_groups_of_a_checkpoint_go_when_the_next_one_was_written(client, run):
    recovery = Recovery(groups_of(client, run), 0)
    trained, waiting = (recovery.next(uid, uid).occurrence for uid in "ab")
    for name in (trained, waiting):
        recovery.groups.store(name, make_group())
    recovery.saved(4, [waiting], durable=4)
    assert names_on(client, run) == {"a@0:0", "b@0:0"}, "the disk may not have the checkpoint yet"
    recovery.saved(8, [], durable=8)
    assert names_on(client, run) == {"b@0:0"}, "checkpoint 4 holds b without its group"
    recovery.saved(12, [], durable=12)
    assert names_on(client, run) == set()


def test_groups_stay_while_no_checkpoint_is_complete(client, run):
    recovery = Recovery(groups_of(client, run), 0)
    recovery.groups.store(recovery.next("a", "a").occurrence, make_group())
    for step in (4, 8, 12):
        recovery.saved(step, [], durable=-1)
    assert names_on(client, run) == {"a@0:0"}


def test_the_last_checkpoint_of_a_run_takes_its_own_groups_along(client, run):
    recovery = Recovery(groups_of(client, run), 0)
    trained, waiting = (recovery.next(uid, uid).occurrence for uid in "ab")
    for name in (trained, waiting):
        recovery.groups.store(name, make_group())
    recovery.saved(4, [waiting], durable=4, last=True)
    assert names_on(client, run) == {"b@0:0"}


def test_a_run_lets_go_of_what_belongs_to_no_fetch_that_is_to_come(client, run):
    first = Recovery(groups_of(client, run), 0)
    first.groups.store(first.next("a", "a").occurrence, make_group())
    first.saved(4, [], durable=4)
    first.groups.store(first.next("b", "b").occurrence, make_group())
    Recovery(groups_of(client, run), 4)
    assert names_on(client, run) == {"b@4:0,0:0"}


def test_groups_that_were_made_with_other_settings_are_not_found(client, run):
    first = Recovery(groups_of(client, run, settings="temperature 1"), 0)
    first.groups.store(first.next("a", "a").occurrence, make_group())
    assert Recovery(groups_of(client, run, settings="temperature 2"), 0).next("b", "a").key is None
    assert names_on(client, run) == set()


def names_on(client: ReplayClient, run: str) -> set[str]:
    items = client.list_items("finished", limit=1000, tags={"run": run}).items
    return {str(item.tags["occurrence"]) for item in items}


# ----------------------------------------------------------------------------------------------- the rows of a group


def make_row(seed: int, **columns: Any) -> dict[str, Any]:
    """A row as verl's agent loop makes it."""
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(3, 50, (2 + seed % 3,), generator=generator)
    response = torch.randint(3, 50, (1 + seed % 4,), generator=generator)
    mask = torch.ones_like(response)
    scores = torch.zeros(len(response))
    scores[-1] = float(seed % 2)
    row = {
        "prompts": prompt,
        "responses": response,
        "response_mask": mask,
        "rollout_log_probs": -torch.rand(len(response), generator=generator),
        "rm_scores": scores,
        "extra_fields": {"turn_scores": [], "min_global_steps": None},
        "multi_modal_inputs": {},
        "num_turns": 2,
        "metrics": {"generate_sequences": 0.1},
        "raw_prompt": [{"role": "user", "content": "1+1="}],
        "dummy_tensor": torch.tensor([0], dtype=torch.uint8),
        "index": np.int64(3),
        "uid": "u",
        "global_steps": 5,
        "loss_mask": mask,
        "input_ids": torch.cat([prompt, response]),
        "position_ids": torch.arange(len(prompt) + len(response)),
    }
    return row | columns


def same(left: Any, right: Any) -> bool:
    """True if two values are equal bit by bit, and of the same types."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[name], right[name]) for name in left)
    return bool(left == right)


AGENTS = {
    "routed_experts": torch.arange(7 * 4).reshape(7, 4).to(torch.int16),
    "teacher_logprobs": torch.rand(7, 3),
    "entropies": torch.rand(4).to(torch.bfloat16),
    "position_ids": torch.arange(28).reshape(4, 7),
    "loss_mask": torch.tensor([1, 0, 1, 1]),
    "multi_modal_inputs": {"pixel_values": torch.rand(2, 3).to(torch.bfloat16)},
    "of_this_agent": ("a", 1, None, [2.5]),
}
ROWS: dict[str, dict[str, dict[str, Any]]] = {
    "sessions": {"0_0": make_row(0), "1_0": make_row(1), "2_0": make_row(2)},
    "more sessions than ten": {f"{session}_0": make_row(session) for session in range(12)},
    "several rows": {"0_0": make_row(0), "0_1": make_row(1), "1_0": make_row(2)},
    "a session without rows": {"0_0": make_row(0), "2_0": make_row(1)},
    "columns of agents": {"0_0": make_row(3, **{**AGENTS, "prompts": torch.tensor([5, 6, 7])})},
    "no log-probabilities": {
        "0_0": {name: value for name, value in make_row(1).items() if name != "rollout_log_probs"}
    },
    "no rewards yet": {"0_0": {name: value for name, value in make_row(1).items() if name != "rm_scores"}},
    "an empty response": {
        "0_0": make_row(0, responses=torch.tensor([], dtype=torch.int64), response_mask=torch.tensor([]).long())
    },
    "log-probabilities of another type": {"0_0": make_row(1, rollout_log_probs=torch.tensor([-0.1, -0.3]).double())},
}


@pytest.mark.parametrize("name", ROWS)
def test_the_rows_of_a_prompt_come_back_bit_by_bit(client, name):
    rows = ROWS[name]
    tags = {key: {"status": "success", "seq_len": 3, "min_global_steps": None} for key in rows}
    key = client.insert(group_of(StoredRows(rows, tags, step=7, prompt="p"), version=6), {"finished": 1.0})
    [item] = client.get([key])
    stored = rows_of(item.group)
    assert stored is not None
    assert list(stored.rows) == list(rows)
    assert stored.tags == tags
    assert stored.step == 7
    assert stored.prompt == "p"
    for row_key, row in rows.items():
        assert list(stored.rows[row_key]) == list(row), "the columns keep their order"
        for column, value in row.items():
            assert same(stored.rows[row_key][column], value), column


def test_the_reward_of_a_session_is_that_of_its_last_row():
    rows = ROWS["several rows"]
    group = group_of(StoredRows(rows, {key: {} for key in rows}, step=1), version=0)
    assert group.rewards.tolist() == [1.0, 0.0]
    assert group.sequence_counts.tolist() == [2, 1]


def test_columns_that_follow_from_others_take_no_room():
    long = make_row(0, responses=torch.ones(1000).long(), response_mask=torch.ones(1000).long())
    long["rollout_log_probs"] = long["rm_scores"] = torch.zeros(1000)
    long["loss_mask"] = long["response_mask"]
    long["input_ids"] = torch.cat([long["prompts"], long["responses"]])
    odd = {**long, "loss_mask": torch.zeros(1000).long()}
    sizes = []
    for row in (long, odd):
        group = group_of(StoredRows({"0_0": row}, {"0_0": {}}, step=1), version=0)
        sizes.append(group.extras["samples"].nbytes)
    assert sizes[1] > sizes[0] + 8000


def test_a_group_of_another_program_has_no_rows():
    assert rows_of(make_group()) is None


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"answer": object()}, "verl's samples have a column answer that cannot be stored, <object"),
        ({"prompts": torch.tensor([0.5])}, r"a column prompts of torch\.float32 of shape \(1,\), which is no row"),
        ({"responses": [1, 2]}, "a column responses of list, which is no row of torch.int64"),
    ],
)
def test_a_column_that_cannot_be_stored_is_named(columns, words):
    rows = {"0_0": make_row(1, **columns)}
    with pytest.raises(ValueError, match=words):
        group_of(StoredRows(rows, {"0_0": {}}, step=1), version=0)


@pytest.mark.parametrize(
    ("prompt", "step", "bound", "usable"),
    [
        ("p", 7, None, True),
        ("p", 700, None, True),
        ("p", 9, 2, True),
        ("p", 10, 2, False),
        ("p", 5, 2, True),
        ("p", 4, 2, False),
        ("q", 7, None, False),
    ],
)
def test_a_stored_group_is_used_for_its_prompt_within_the_bound_of_staleness(prompt, step, bound, usable):
    assert StoredRows({}, {}, step=7, prompt="p").usable(prompt, step, bound) is usable


def test_prompts_differ_by_their_digest():
    first, second = ([{"role": "user", "content": content}] for content in ("1+1=", "1+2="))
    assert digest(first) == digest(json.loads(json.dumps(first)))
    assert digest(first) != digest(second)


def test_prompts_differ_by_the_digest_of_the_answer_that_rewards_are_computed_from():
    prompt = [{"role": "user", "content": "1+1="}]
    answers = [{"style": "rule", "ground_truth": answer} for answer in ("2", "3")]
    assert digest(prompt, answers[0]) == digest(prompt, dict(answers[0]))
    assert digest(prompt, answers[0]) != digest(prompt, answers[1])
    assert digest(prompt, answers[0]) != digest(prompt)


def test_a_prompt_with_a_value_that_cannot_be_stored_is_refused_by_name():
    with pytest.raises(ValueError, match="verl's prompts have a reward_model that cannot be stored"):
        digest("1+1=", {"judge": object()})

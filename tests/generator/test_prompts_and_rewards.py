import asyncio
import gzip
import importlib.util
import itertools
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from replay_generator.errors import PromptError
from replay_generator.prompts.prompt import Prompt, cycle_prompts, load_prompts, read_prompts
from replay_generator.rewards.functions import (
    Reward,
    RewardError,
    Scorer,
    exact_match,
    group_reward,
    load_reward,
    thread_safe,
)
from tests.kit.clocks import stopped_clock
from tests.kit.models import save_model


def write(folder: Path, *lines: str) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(lines))
    return path


def test_rows_keep_everything_and_are_named_by_their_own_id(tmp_path):
    path = write(tmp_path, '{"prompt": "1+1=", "answer": "2", "prompt_id": 17}', "", '{"prompt": "2+2=", "level": 3}')
    first, second = read_prompts(path)
    assert first.prompt_id == "17"
    assert first.content == "1+1="
    assert first.row["answer"] == "2"
    assert second.row["level"] == 3


def test_a_prompt_without_an_id_is_named_the_same_in_every_run_and_unlike_others():
    assert Prompt.of({"prompt": "1+1="}).prompt_id == "9ffe8627f3749018"
    assert Prompt.of({"prompt": "1+1="}).prompt_id != Prompt.of({"prompt": "1+2="}).prompt_id


@pytest.mark.parametrize(
    "line",
    [
        "not json",
        "[1]",
        '{"text": "1+1="}',
        '{"prompt": ""}',
        '{"prompt": 3}',
        '{"prompt": []}',
        '{"prompt": [{"role": "user"}]}',
        '{"prompt": ["1+1="]}',
    ],
)
def test_a_line_without_a_prompt_is_an_error_that_names_file_and_line(tmp_path, line):
    path = write(tmp_path, '{"prompt": "fine"}', line)
    with pytest.raises(ValueError, match=r"prompts\.jsonl, line 2: "):
        read_prompts(path)


def test_a_byte_order_mark_does_not_belong_to_the_first_line(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "1+1="}\n{"prompt": "é"}\n', encoding="utf-8-sig")
    assert [prompt.content for prompt in read_prompts(path)] == ["1+1=", "é"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"prompt": "a"}\n{"prompt": "é"}\n'.encode("latin-1"), r"line 2: byte 13, b'\\xe9', is not UTF-8: .*iconv"),
        (b"\x28\xb5\x2f\xfd\x00", "line 1: this is a zstd file, .*unzstd"),
        (gzip.compress(b'{"prompt": "a"}\n' * 99, mtime=0)[:-12], "a damaged gzip file: Compressed file ended before"),
        ('{"prompt": "a"}'.encode("utf-16"), "line 1: this is text in UTF-16, .*iconv"),
        (b"PAR1\x15\x04\x15", "not a Parquet file: "),
    ],
    ids=["Latin-1", "zstd", "half a gzip file", "UTF-16", "damaged Parquet"],
)
def test_a_file_in_another_encoding_is_named_with_the_line_and_the_remedy(tmp_path, content, says):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"prompts\.jsonl[,:] {says}"):
        read_prompts(path)


def test_a_line_separator_inside_a_text_does_not_end_the_line(tmp_path):
    assert read_prompts(write(tmp_path, '{"prompt": "a\u2028b"}'))[0].content == "a\u2028b"


def test_a_file_without_prompts_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="has no prompts"):
        read_prompts(write(tmp_path, ""))


def test_every_epoch_has_every_prompt_once_in_an_order_of_its_own():
    prompts = [Prompt.of({"prompt": str(number)}) for number in range(20)]
    drawn = list(itertools.islice(cycle_prompts(prompts, seed=3), 60))
    epochs = [[prompt.content for prompt in drawn[start : start + 20]] for start in (0, 20, 40)]
    assert all(sorted(epoch, key=int) == [prompt.content for prompt in prompts] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_the_order_follows_from_the_seed():
    prompts = [Prompt.of({"prompt": str(number)}) for number in range(20)]
    orders = [[p.content for p in cycle_prompts(prompts, seed=seed, epochs=2)] for seed in (3, 3, 4)]
    assert orders[0] == orders[1] != orders[2]


@pytest.mark.parametrize("epochs", [None, 2])
def test_no_prompts_are_an_error_at_once(epochs):
    with pytest.raises(ValueError, match="no prompts to cycle through"):
        cycle_prompts([], epochs=epochs)


class Chats:
    """A tokenizer with a token a character and a chat template."""

    chat_template = "any"

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(character) for character in text]

    def apply_chat_template(
        self,
        messages: list[dict[str, str]],
        *,
        tools: None,
        add_generation_prompt: bool,
        tokenize: bool,
        style: str = "",
    ) -> str:
        assert not tokenize
        assert add_generation_prompt
        text = style + "".join(f"<{message['role']}>{message['content']}" for message in messages)
        return f"{text}<assistant>"


def tokenized(prompt: Prompt, **template: str) -> str:
    return bytes(prompt.tokenize(Chats(), **template)).decode()


def test_messages_are_tokenized_by_the_chat_template():
    question = {"role": "user", "content": "1+1="}
    assert tokenized(Prompt.of("1+1=")) == "1+1="
    assert tokenized(Prompt.of([question])) == "<user>1+1=<assistant>"
    assert tokenized(Prompt.of({"prompt": [question]}), style="short:") == "short:<user>1+1=<assistant>"
    started = Prompt.of([question, {"role": "assistant", "content": "It is"}])
    assert tokenized(started) == "<user>1+1=<assistant>It is"


def test_a_text_becomes_a_chat_with_the_systems_message_before_it():
    assert tokenized(Prompt.of("1+1=").as_chat()) == "<user>1+1=<assistant>"
    assert tokenized(Prompt.of("1+1=").as_chat("Add.")) == "<system>Add.<user>1+1=<assistant>"
    own = Prompt.of([{"role": "system", "content": "Own."}, {"role": "user", "content": "1+1="}])
    assert tokenized(own.as_chat("Add.")) == "<system>Own.<user>1+1=<assistant>"
    assert Prompt.of("1+1=").as_chat("Add.").prompt_id == Prompt.of("1+1=").prompt_id


def test_a_real_tokenizer_applies_its_template_and_without_one_says_so(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(save_model(tmp_path))
    prompt = Prompt.of([{"role": "user", "content": "1+1="}])
    with pytest.raises(PromptError, match=f"prompt '{prompt.prompt_id}' .* the tokenizer has no chat template"):
        prompt.tokenize(tokenizer)
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message.content }}{% endfor %}{% if add_generation_prompt %}?{% endif %}"
    )
    assert prompt.tokenize(tokenizer) == tokenizer.encode("1+1=?")


def test_another_field_may_hold_the_prompt():
    assert Prompt.of({"question": "1+1="}, "question").content == "1+1="
    with pytest.raises(ValueError, match="needs the field 'prompt'; this one has question"):
        Prompt.of({"question": "1+1="})


def test_rows_of_a_data_set_are_read_one_by_one_as_they_are_asked_for():
    class Rows:
        read = 0

        def __len__(self) -> int:
            return 10**7

        def __getitem__(self, index: int) -> dict[str, str]:
            self.read += 1
            return {"question": str(index)}

    rows = Rows()
    drawn = list(itertools.islice(cycle_prompts(rows, prompt_field="question"), 5))
    assert rows.read == 5
    assert len({prompt.content for prompt in drawn}) == 5


def test_what_is_no_file_needs_the_package_for_data_sets(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"missing\.jsonl"):
        load_prompts(str(tmp_path / "missing.jsonl"))
    if importlib.util.find_spec("datasets") is None:
        with pytest.raises(ImportError, match="pip install datasets"):
            load_prompts(str(tmp_path))


def test_a_data_set_on_disk_is_read_by_split_and_column(tmp_path):
    datasets = pytest.importorskip("datasets", reason="prompts from data sets need the package")
    rows = datasets.Dataset.from_list([{"question": "1+1=", "answer": "2"}, {"question": "2+2=", "answer": "4"}])
    datasets.DatasetDict({"train": rows}).save_to_disk(tmp_path)
    loaded = load_prompts(str(tmp_path), prompt_field="question")
    prompts = list(cycle_prompts(loaded, epochs=1, prompt_field="question"))
    assert {(prompt.content, prompt.row["answer"]) for prompt in prompts} == {("1+1=", "2"), ("2+2=", "4")}
    with pytest.raises(ValueError, match="has no split 'test', only train"):
        load_prompts(str(tmp_path), split="test")
    with pytest.raises(ValueError, match="has no column 'prompt', only question, answer"):
        load_prompts(str(tmp_path))


# ------------------------------------------------------------------------------------------------------ rewards


async def scored(*rewards: Any, texts: tuple[str, ...] = ("a", "bb"), **options: Any) -> list[float]:
    total, _ = await Scorer(list(rewards), **options).score({}, texts)
    return total.tolist()


def length(row: Any, text: str) -> float:
    return len(text)


async def test_rewards_of_every_kind_are_summed_by_weight():
    async def slow(row: Any, text: str) -> float:
        await asyncio.sleep(0.01)
        return 10.0 * len(text)

    @group_reward
    def ranks(row: Any, texts: list[str]) -> Any:
        return np.arange(len(texts))

    @group_reward
    async def flags(row: Any, texts: list[str]) -> list[bool]:
        return [text == "a" for text in texts]

    class Model:
        async def __call__(self, row: Any, text: str) -> torch.Tensor:
            return torch.tensor(1000.0)

    assert await scored(length) == [1, 2]
    assert await scored(length, Reward(slow, 0.5), Reward(ranks, 100), flags, Model()) == [1007, 1112]
    assert await scored(lambda row, text: slow(row, text)) == [10, 20]


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda row, text: "1.0", "returned '1.0', which is no number"),
        (lambda row, text: float("inf"), r"returned \[inf, inf\]: rewards must be finite"),
        (group_reward(lambda row, texts: [1.0]), "returned 1 reward for 2 completions"),
        (group_reward(lambda row, texts: 1.0), r"returned 1.0, not one reward for each completion \(2\)"),
        (group_reward(lambda row, texts: {"a": 1}), r"returned .*, not one reward for each completion \(2\)"),
        (lambda row, text: np.zeros(3), "returned .*"),
        (lambda row: 1.0, "raised TypeError"),
        (lambda row, text: next(iter(())), "raised RuntimeError: StopIteration"),
    ],
)
async def test_what_is_no_reward_is_an_error_that_names_the_function(function, says):
    with pytest.raises(RewardError, match=f"reward function 'odd' {says}"):
        await scored(length, Reward(function, name="odd"))


async def test_a_function_that_takes_too_long_has_failed_and_the_next_group_is_scored():
    stuck = threading.Event()

    def hangs(row: Any, text: str) -> float:
        if text == "hang":
            go_on(2.0)
            stuck.wait(60)
        return 1.0

    scorer = Scorer(hangs, timeout=1.0)
    with stopped_clock() as go_on:
        with pytest.raises(RewardError, match=r"'hangs' took longer than 1 s for 1 completion "):
            await scorer.score({}, ["hang"])
        assert (await scorer.score({}, ["fine"]))[0].tolist() == [1.0]
    stuck.set()


async def test_the_clock_of_a_function_starts_with_its_call_and_not_with_the_wait_for_its_thread():
    def slow(row: Any, text: str) -> float:
        go_on(2.0)
        return 1.0

    scorer = Scorer(slow, timeout=3.0)  # one call has time enough, all together have not
    with stopped_clock() as go_on:
        groups = await asyncio.gather(*(scorer.score({}, ["a"]) for _ in range(9)))
    assert [rewards.tolist() for rewards, _ in groups] == [[1.0]] * 9


@pytest.mark.parametrize(
    ("threads", "safe", "expected"),
    [(None, False, 1), (1, False, 1), (3, False, 3), (None, True, 6)],
    ids=["one by default", "one", "three", "all of a function that says that it is thread-safe"],
)
async def test_a_function_scores_so_many_groups_at_a_time(threads, safe, expected):
    together, lock, inside, most = threading.Barrier(expected), threading.Lock(), 0, 0

    def blocks(row: Any, text: str) -> float:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        together.wait(30)  # breaks unless so many are inside
        with lock:
            inside -= 1
        return 0.0

    scorer = Scorer(thread_safe(blocks) if safe else blocks, threads=threads)
    await asyncio.gather(*(scorer.score({}, ["a"]) for _ in range(6)))
    assert most == expected


async def test_an_error_names_the_line_of_the_users_file(tmp_path, monkeypatch):
    (tmp_path / "lined_rewards.py").write_text(
        "import json\n\ndef parse(text):\n    return json.loads(text)\n\n"
        "def strict(row, text):\n    return parse(text)['score']\n\n"
        "async def late(row, text):\n    raise KeyError(text)\n\n"
        "def odd(row, text):\n    return 'odd'\n\n"
        "class Model:\n    def __call__(self, row):\n        return 1.0\n\nmodel = Model()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, says in {
        "strict": r"raised JSONDecodeError: .* \(.*lined_rewards\.py, line 4\)$",
        "late": r"raised KeyError: 'a' \(.*lined_rewards\.py, line 10\)$",
        "odd": r"returned 'odd', which is no number \(.*lined_rewards\.py, line 12\)$",
        "model": r"raised TypeError: .* \(.*lined_rewards\.py, line 16\)$",
    }.items():
        with pytest.raises(RewardError, match=says):
            await scored(load_reward(f"lined_rewards:{name}"))


def test_two_rewards_need_two_names():
    with pytest.raises(ValueError, match="names of their own, not length, length"):
        Scorer([length, length])
    Scorer([length, Reward(length, name="again")])
    with pytest.raises(ValueError, match="at least one"):
        Scorer([])


def test_a_weight_may_follow_the_name_of_a_reward():
    assert load_reward("exact_match=0.25").weight == 0.25
    for name in ("exact_match=", "exact_match=much", "exact_match=nan"):
        with pytest.raises(ValueError, match="weight"):
            load_reward(name)


def test_exact_match_ignores_space_around_and_nothing_else():
    assert exact_match({"answer": "42"}, " 42\n") == 1.0
    assert exact_match({"answer": 42}, "42") == 1.0
    assert exact_match({"answer": "42"}, "4 2") == 0.0
    assert exact_match({"answer": "42"}, "") == 0.0


def test_exact_match_without_an_answer_says_what_the_row_has():
    with pytest.raises(ValueError, match="needs an 'answer' in each row; this one has prompt"):
        exact_match({"prompt": "1+1="}, "2")


def test_a_reward_loads_by_name_or_by_module_and_function(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text("def brevity(row, text): return -len(text)\nLIMIT = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load_reward("exact_match").function is exact_match
    assert load_reward("my_rewards:brevity").function({}, "abc") == -3
    for name in ("brevity", "my_rewards:", "no_such_module:f", "my_rewards:missing", "my_rewards:LIMIT"):
        with pytest.raises(ValueError, match=name):
            load_reward(name)


def test_the_client_package_imports_no_inference_library():
    code = (
        "import sys, replay_client, replay_generator, replay_generator.engines.vllm, "
        "replay_generator.prompts.prompt, replay_generator.rewards.functions\n"
        "print([name for name in ('torch', 'transformers', 'vllm') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from replay_client.prompts import Prompt, cycle_prompts, read_prompts
from replay_client.rewards import exact_match, load_reward


def write(folder: Path, *lines: str) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(lines))
    return path


def test_rows_keep_everything_and_are_named_by_their_own_id(tmp_path: Path) -> None:
    path = write(tmp_path, '{"prompt": "1+1=", "answer": "2", "prompt_id": 17}', "", '{"prompt": "2+2=", "level": 3}')
    first, second = read_prompts(path)
    assert (first.prompt_id, first.text, first.row["answer"]) == ("17", "1+1=", "2")
    assert second.row["level"] == 3


def test_a_prompt_without_an_id_is_named_the_same_in_every_run_and_unlike_others() -> None:
    assert Prompt.from_row({"prompt": "1+1="}).prompt_id == "9ffe8627f3749018"
    assert Prompt.from_row({"prompt": "1+1="}).prompt_id != Prompt.from_row({"prompt": "1+2="}).prompt_id


@pytest.mark.parametrize("line", ["not json", "[1]", '{"text": "1+1="}', '{"prompt": ""}', '{"prompt": 3}'])
def test_a_line_without_a_prompt_is_an_error_that_names_file_and_line(tmp_path: Path, line: str) -> None:
    path = write(tmp_path, '{"prompt": "fine"}', line)
    with pytest.raises(ValueError, match=r"prompts\.jsonl, line 2: "):
        read_prompts(path)


def test_a_line_separator_inside_a_text_does_not_end_the_line(tmp_path: Path) -> None:
    assert read_prompts(write(tmp_path, '{"prompt": "a\u2028b"}'))[0].text == "a\u2028b"


def test_a_file_without_prompts_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no prompts"):
        read_prompts(write(tmp_path, ""))


def test_every_epoch_has_every_prompt_once_in_an_order_of_its_own() -> None:
    prompts = [Prompt.from_row({"prompt": str(number)}) for number in range(20)]
    drawn = list(itertools.islice(cycle_prompts(prompts, seed=3), 60))
    epochs = [[prompt.text for prompt in drawn[start : start + 20]] for start in (0, 20, 40)]
    assert all(sorted(epoch, key=int) == [prompt.text for prompt in prompts] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_the_order_follows_from_the_seed() -> None:
    prompts = [Prompt.from_row({"prompt": str(number)}) for number in range(20)]
    orders = [[p.text for p in cycle_prompts(prompts, seed=seed, epochs=2)] for seed in (3, 3, 4)]
    assert orders[0] == orders[1] != orders[2]


def test_exact_match_ignores_space_around_and_nothing_else() -> None:
    assert exact_match({"answer": "42"}, " 42\n") == 1.0
    assert exact_match({"answer": 42}, "42") == 1.0
    assert exact_match({"answer": "42"}, "4 2") == 0.0
    assert exact_match({"answer": "42"}, "") == 0.0


def test_exact_match_without_an_answer_says_what_the_row_has() -> None:
    with pytest.raises(ValueError, match="needs an 'answer' in each row; this one has prompt"):
        exact_match({"prompt": "1+1="}, "2")


def test_a_reward_loads_by_name_or_by_module_and_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards.py").write_text("def brevity(row, text): return -len(text)\nLIMIT = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load_reward("exact_match") is exact_match
    assert load_reward("my_rewards:brevity")({}, "abc") == -3
    for name in ("brevity", "my_rewards:", "no_such_module:f", "my_rewards:missing", "my_rewards:LIMIT"):
        with pytest.raises(ValueError, match=name):
            load_reward(name)


def test_the_client_package_imports_no_inference_library() -> None:
    code = (
        "import sys, replay_client, replay_client.generator, replay_client.engines.vllm, "
        "replay_client.engines.transformers, replay_client.prompts, replay_client.rewards\n"
        "print([name for name in ('torch', 'transformers', 'vllm') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"

"""The built-in reward for answers of math problems."""

from collections import deque

import pytest

from replay_generator.rewards import math_answers
from replay_generator.rewards.functions import RewardError, Scorer, load_reward, math_answer

pytest.importorskip("math_verify", reason="the extra math")

SOLUTION = "She sold 48/2 = <<48/2=24>>24.\nIn all 72.\n#### 72"


@pytest.mark.parametrize(
    ("answer", "completion"),
    [
        (SOLUTION, "\\boxed{72}"),
        (SOLUTION, "So we have\n#### 72"),
        (SOLUTION, "#### 72.0\nand that is all"),
        (SOLUTION, "#### $72"),
        (SOLUTION, "The answer is 72."),
        (SOLUTION, "I think 7, no \\boxed{7}, it is \\boxed{72}"),
        (SOLUTION, "<think>\\boxed{5}</think>\n\\boxed{72}"),
        (SOLUTION, "hm, 5</think>The final answer is $72$."),
        (SOLUTION, "\\boxed{144/2}"),
        ("#### 1,072", "\\boxed{1072}"),
        ("1072", "\\boxed{1,072}"),
        (72, "\\boxed{72}"),
        ("\\frac{1}{2}", "\\boxed{0.5}"),
        ("so \\boxed{\\frac{1}{2}}", "hence \\boxed{\\dfrac{2}{4}}"),
        ("$x^2+1$", "\\boxed{1+x^2}"),
        ("(1, 2)", "\\boxed{(1,2)}"),
        ("Paris", "\\boxed{Paris}"),
        (["71", "72"], "\\boxed{72}"),
        ("72", "so **#### 72**"),
        ("72", "#### **72**"),
        ("72", "#### 72 clips in all"),
        ("72", "#### $72 dollars"),
        (r"\$18.00", "#### 18"),
    ],
)
def test_an_equal_answer_is_right(answer, completion):
    assert math_answer({"answer": answer}, completion) == 1.0


@pytest.mark.parametrize(
    "completion",
    [
        "",
        "\\boxed{}",
        "\\boxed{27}",
        "\\boxed{72",
        "#### 27",
        "#### ",
        "72, or \\boxed{7}",
        "The answer is 27.",
        "<think>It is \\boxed{72}, but wait",
        "I do not know.",
        "\\boxed{" + "(" * 5000 + "}",
        "\\boxed{" * 5000,
    ],
    ids=lambda each: each[:20],
)
def test_another_answer_is_wrong(completion):
    assert math_answer({"answer": SOLUTION}, completion) == 0.0


async def test_what_takes_for_ever_to_compute_is_wrong_and_the_next_is_scored():
    scorer = Scorer(load_reward("math_answer"))
    rewards, _ = await scorer.score({"answer": SOLUTION}, ["\\boxed{9^{9^{9^{9}}}}", "\\boxed{144/2}"])
    assert rewards.tolist() == [0.0, 1.0]


OUT_OF_MEMORY = """
ExprExtractionConfig = LatexExtractionConfig = dict

def parse(text, kinds, parsing_timeout, raise_on_error):
    return [text]

def verify(gold, target, timeout_seconds, raise_on_error=False):
    try:
        raise MemoryError
    except Exception:
        if raise_on_error:
            raise
        return False
"""
"""A module in the place of math-verify, whose comparisons need too much memory. The real one handles errors so too."""


def test_what_takes_too_much_memory_to_compare_is_wrong_and_is_logged(tmp_path, monkeypatch, caplog):
    (tmp_path / "math_verify.py").write_text(OUT_OF_MEMORY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(math_answers, "_idle", deque())
    assert math_answer({"answer": SOLUTION}, "\\boxed{144/2}") == 0.0
    assert "an answer took too long or too much memory to compare, and counts as wrong" in caplog.text
    assert not math_answers._idle


async def test_a_built_in_reward_reads_a_field_by_its_path():
    row = {"reward_model": {"ground_truth": "34"}, "solution": "\\boxed{35}"}
    texts = ["\\boxed{34}", "34", "\\boxed{35}"]
    rewards, _ = await Scorer(load_reward("math_answer:reward_model.ground_truth=2")).score(row, texts)
    assert rewards.tolist() == [2.0, 2.0, 0.0]
    rewards, _ = await Scorer(load_reward("exact_match:reward_model.ground_truth")).score(row, texts)
    assert rewards.tolist() == [0.0, 1.0, 0.0]
    rewards, _ = await Scorer(load_reward("math_answer:solution")).score(row, texts)
    assert rewards.tolist() == [0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("name", "row", "says"),
    [
        ("math_answer", {"question": "a"}, "needs an 'answer' in each row; this one has question: name another field"),
        ("math_answer", {"answer": None}, "needs an 'answer' in each row; here it is None"),
        (
            "exact_match:a.b",
            {"a": {"c": 1}},
            "needs an 'a.b' in each row; a has c: name another field with exact_match:",
        ),
    ],
)
async def test_a_row_without_the_answer_says_what_it_has(name, row, says):
    with pytest.raises(RewardError, match=says):
        await Scorer(load_reward(name)).score(row, ["a"])

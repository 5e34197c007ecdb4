"""What functions of users do to a run: they fail alone, and are named with their file and line."""

import asyncio
import os
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest

from replay_client.errors import ReplayError
from replay_client.settings import load_function
from replay_client.waits import in_daemon_thread
from replay_generator import GeneratorConfig, PromptError, RolloutGenerator, user_code
from replay_generator.rewards import Reward, RewardError, Scorer, group_reward
from replay_generator.rollouts import single_turn
from replay_generator.user_code import LoopWatch, UserCodeError, call, run
from tests.factories import async_until, stopped_clock
from tests.generator import user_functions
from tests.generator.factories import RecordingClient, ScriptedEngine, generate, make_prompts, played
from tests.generator.test_stages import between, sizes

ENDINGS = {
    "exits": "SystemExit: 3",
    "interrupts": "KeyboardInterrupt: enough",
    "cancels": "CancelledError: mine",
    "exits_later": "SystemExit: 3",
    "interrupts_later": "KeyboardInterrupt: enough",
    "cancels_later": "CancelledError: mine",
    "exits_in_a_task": "SystemExit: 3",
}
"""Functions that want to end more than themselves, and what they raise."""
PLAIN = ("exits", "interrupts", "cancels")
ASYNC = tuple(name for name in ENDINGS if name not in PLAIN)
PLACE = r"\(.*user_functions\.py, line \d+\)"


async def scored(*rewards: Any, texts: tuple[str, ...] = ("a", "bb", "ccc"), **row: Any) -> list[float]:
    total, _ = await Scorer(list(rewards)).score(row, texts)
    return total.tolist()


# ------------------------------------------------------------------------------------------------ what ends processes


@pytest.mark.parametrize("name", ENDINGS)
@pytest.mark.parametrize("kind", [Reward, group_reward], ids=["reward", "group reward"])
async def test_a_reward_that_wants_to_end_the_process_has_failed_and_is_named_with_its_line(name, kind):
    async def later(*args: Any) -> Any:
        return await getattr(user_functions, name)(*args)

    def now(*args: Any) -> Any:
        return getattr(user_functions, name)(*args)

    function = kind(now if name in PLAIN else later)
    with pytest.raises(RewardError, match=f"reward function '(now|later)' raised {ENDINGS[name]} "):
        await scored(function)
    with pytest.raises(RewardError, match=f"reward function '{name}' raised {ENDINGS[name]} {PLACE}$"):
        await scored(getattr(user_functions, name))


@pytest.mark.parametrize("name", ENDINGS)
async def test_a_hook_that_wants_to_end_the_process_loses_its_own_rollout(name):
    with pytest.raises(PromptError, match=f"function '{name}' raised {ENDINGS[name]} {PLACE}"):
        await played(getattr(user_functions, name))


@pytest.mark.parametrize("name", PLAIN)
async def test_a_priority_that_wants_to_end_the_process_is_an_error_of_its_group(name):
    priority = getattr(user_functions, name)
    with pytest.raises(PromptError, match=f"no priority: .*function '{name}' raised {ENDINGS[name]} {PLACE}"):
        await generate(RecordingClient(), ScriptedEngine(), single_turn, priority=priority)


@pytest.mark.parametrize("name", PLAIN)
async def test_a_filter_of_groups_that_wants_to_end_the_process_ends_the_run_with_its_line(name):
    generator = RolloutGenerator(
        RecordingClient(),
        ScriptedEngine(),
        make_prompts(),
        lambda row, text: float(len(text)),
        GeneratorConfig(max_groups=1),
        keep=getattr(user_functions, name),
    )
    with pytest.raises(UserCodeError, match=f"function '{name}' raised {ENDINGS[name]} {PLACE}"):
        await generator.run()


@pytest.mark.parametrize("name", ENDINGS)
async def test_a_stage_that_wants_to_end_the_process_ends_with_its_line_and_gives_its_item_back(name):
    async with between(getattr(user_functions, name), 1) as (client, _, running):
        with pytest.raises(UserCodeError, match=f"function '{name}' raised {ENDINGS[name]} {PLACE}"):
            await running
        assert await sizes(client) == [1, 0, 0]


async def test_ones_own_cancellation_passes_through_users_code():
    entered = asyncio.Event()

    async def waits() -> None:
        entered.set()
        await asyncio.Event().wait()

    calling = asyncio.create_task(call(waits))
    await entered.wait()
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling


async def test_work_in_a_thread_cannot_end_the_event_loop():
    with pytest.raises(ReplayError, match=r"work in a thread raised SystemExit\(3\) \(.*user_functions\.py, line"):
        await in_daemon_thread(user_functions.exits)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("import sys; sys.exit(0)", r"raised SystemExit: 0 \(.*odd_module\.py, line 2\)"),
        ("1 / 0", r"raised ZeroDivisionError: .* \(.*odd_module\.py, line 2\)"),
        ("def f(:", r"raised SyntaxError: "),
    ],
)
def test_a_module_that_cannot_be_imported_is_named_with_its_line(tmp_path, monkeypatch, line, says):
    (tmp_path / "odd_module.py").write_text(f"import math\n{line}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "odd_module", raising=False)
    with pytest.raises(ValueError, match=f"reward 'odd_module:f': its module cannot be imported, for it {says}"):
        load_function("reward", "odd_module:f", {})


# ------------------------------------------------------------------------------------------------ abstaining


async def test_a_sum_of_rewards_skips_a_function_that_abstains():
    def only_long(row: Any, text: str) -> float | None:
        return float(len(text)) if len(text) > 1 else None

    async def only_a(row: Any, text: str) -> float | None:
        return 1.0 if text == "a" else None

    @group_reward
    def last(row: Any, texts: list[str]) -> list[float | None]:
        return [None] * (len(texts) - 1) + [100.0]

    total, by_name = await Scorer([Reward(only_long, 2.0), only_a, last]).score({}, ["a", "bb", "ccc"])
    assert total.tolist() == [1.0, 4.0, 106.0]
    assert np.isnan(by_name["only_long"]).tolist() == [True, False, False]
    assert np.isnan(by_name["only_a"]).tolist() == [False, True, True]


async def test_a_rollout_for_which_all_functions_abstain_has_failed_and_the_others_make_the_group():
    def only_some(row: Any, text: str) -> float | None:
        return 1.0 if text == "78" else None

    client = RecordingClient()
    stats = await generate(client, ScriptedEngine(), single_turn, reward=only_some, group_size=3, min_rollouts=1)
    group = client.inserts[0][0]
    assert group.rewards.tolist() == [1.0]
    assert stats["rollouts_failed"] == 2
    assert "it has no reward: 'only_some'" in group.meta["failures"][0]


async def test_a_group_that_lacks_a_reward_is_skipped_once_the_run_has_scored_anything(caplog):
    def only_the_first(row: Any, text: str) -> float | None:
        calls.append(text)
        return 1.0 if len(calls) == 1 else None

    calls: list[str] = []
    stats = await generate(RecordingClient(), ScriptedEngine(), single_turn, reward=only_the_first, group_size=2)
    assert stats["skipped"] == 1
    assert any("it has no reward: 'only_the_first'" in line for line in caplog.messages)


async def test_without_a_least_number_of_rollouts_a_rollout_without_a_reward_fails_its_group_with_the_line():
    def never(row: Any, text: str) -> None:
        pass

    with pytest.raises(
        PromptError, match=r"it has no reward: 'never' \(.*test_user_code\.py, line \d+\) returned None"
    ):
        await generate(RecordingClient(), ScriptedEngine(), single_turn, reward=never)


# ------------------------------------------------------------------------------------------------ the event loop


async def test_a_function_in_which_the_event_loop_stands_still_is_named_with_its_line(caplog):
    said = threading.Event()
    caplog.handler.addFilter(lambda record: said.set() or True)

    async def judge(row: Any, text: str) -> float:
        said.wait(60)
        return 1.0

    with LoopWatch(seconds=0.1):
        assert await scored(judge, texts=("a",)) == [1.0]
    line = caplog.messages[0]
    assert "the event loop stands still for 0.1 s now, in function 'judge'" in line
    assert "test_user_code.py, line" in line


# ------------------------------------------------------------------------------------------------ signals

ANSWERS = tuple("x" * number for number in range(200))
IN_A_SCRIPT = [float(number % 3) for number in range(200)]


@pytest.mark.parametrize(
    "name",
    [
        "honest_grader",
        "swallowing_grader",
        "silent_grader",
        "group_grader",
        "object_grader",
        "lambda_grader",
        "closure_grader",
        "wrapped_grader",
    ],
)
async def test_a_grader_that_asks_for_signals_scores_as_in_a_script_and_it_is_said_once(name, caplog):
    function = getattr(user_functions, name)
    assert await scored(function, texts=ANSWERS) == IN_A_SCRIPT
    assert await scored(function, texts=ANSWERS[:3]) == IN_A_SCRIPT[:3]
    said = [line for line in caplog.messages if "asks for a signal (signal.signal(SIGALRM)" in line]
    assert len(said) == 1
    assert "user_functions.py, line" in said[0]


async def test_a_request_by_a_name_that_its_module_imported_is_noted_too():
    assert await scored(user_functions.grader_with_an_imported_timer) == [1.0, 2.0, 0.0]


async def test_a_child_that_a_function_forks_may_ask_for_signals_and_the_function_stays_in_its_thread(caplog):
    assert await scored(user_functions.forking_grader) == [1.0, 2.0, 0.0]
    assert not any("asks for a signal" in line for line in caplog.messages)


def test_a_callback_that_wants_to_end_the_process_is_an_error_with_its_line():
    with pytest.raises(UserCodeError, match=f"callback of the event loop' raised SystemExit: 3 {PLACE}"):
        run(scored(user_functions.exits_in_a_callback))


SCRIPT = """
import asyncio
from replay_generator.rewards import Scorer
from tests.generator.user_functions import swallowing_grader

def own(row, text):
    return swallowing_grader(row, text)

def work():
    print("the work of the program")
    for function in (swallowing_grader, own):
        try:
            print(asyncio.run(Scorer(function).score({}, ["x", "xx"]))[0].tolist())
        except Exception as error:
            print(error)

"""


@pytest.mark.parametrize(
    ("end", "own"),
    [
        ("work()", "would run that program again: define it in a module, or begin the work of the program with"),
        ("if __name__ == '__main__':\n    work()", "[1.0, 2.0]"),
    ],
)
def test_a_process_for_signals_never_runs_the_program_again(tmp_path, end, own):
    (tmp_path / "program.py").write_text(SCRIPT + end)
    command = [sys.executable, str(tmp_path / "program.py")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(said) == 3
    assert said[0] == "the work of the program"
    assert said[1] == "[1.0, 2.0]"
    assert own in said[2]


async def test_a_function_that_no_process_can_import_and_that_asks_for_signals_is_one_sentence():
    def local(row: Any, text: str) -> float:
        return user_functions.swallowing_grader(row, text)

    says = r"'local' asks for a signal \(signal.signal\(SIGALRM\)\), .*define it at the top of a module \(.*local.*\)"
    with pytest.raises(RewardError, match=says):
        await scored(local)


async def test_a_function_that_fails_in_its_process_is_named_with_its_line():
    with pytest.raises(RewardError, match=f"'grader_that_fails' raised KeyError: 'answer' {PLACE}$"):
        await scored(user_functions.grader_that_fails)


async def test_a_process_that_a_function_ends_is_an_error_of_its_call_and_the_next_call_has_another():
    with pytest.raises(RewardError, match="ended the process that called it, with exit code 7"):
        await scored(user_functions.grader_that_dies, texts=("die",))
    assert await scored(user_functions.grader_that_dies, texts=("x",)) == [1.0]


async def test_a_function_that_hangs_in_its_process_ends_at_the_time_limit_and_the_next_call_has_another(tmp_path):
    entered = tmp_path / "entered"
    scorer = Scorer(user_functions.grader_that_hangs, timeout=60.0)
    with stopped_clock() as go_on:
        hanging = asyncio.create_task(scorer.score({"entered": str(entered)}, ["hang"]))
        while not entered.exists():
            await asyncio.sleep(0)
        go_on(61.0)
        with pytest.raises(RewardError, match="'grader_that_hangs' took longer than 60 s"):
            await hanging
    total, _ = await scorer.score({}, ["x"])
    assert total.tolist() == [1.0]


async def test_a_tool_that_asks_for_signals_answers():
    assert await call(user_functions.number_tool, number=4) == "it is 4"


async def test_nobody_else_pays_for_a_grader_with_signals():
    threads = []

    def plain(row: Any, text: str) -> float:
        threads.append(threading.current_thread().name)
        return 0.0

    assert await scored(plain, user_functions.swallowing_grader) == [1.0, 2.0, 0.0]
    assert set(threads) == {"replay-plain"}


async def test_threads_that_nobody_waits_for_are_counted_named_and_bounded(caplog):
    go_on = threading.Event()
    begun: list[str] = []

    def hangs(row: Any, text: str) -> float:
        begun.append(threading.current_thread().name)
        go_on.wait()
        return 1.0

    scorer = Scorer(hangs, timeout=0.05)
    before = user_code.threads_left()
    try:
        for _ in range(user_code.MOST_LEFT):
            with pytest.raises(RewardError, match="reward function 'hangs' took longer than"):
                await scorer.score({}, ["text"])
        for _ in range(3):
            with pytest.raises(
                RewardError, match="'hangs' has 8 threads that do not end, so no further one is started"
            ):
                await scorer.score({}, ["text"])
        assert user_code.threads_left() == before + user_code.MOST_LEFT
        await async_until(lambda: len(begun) == user_code.MOST_LEFT)
        assert begun == ["replay-hangs"] * user_code.MOST_LEFT
        assert "function 'hangs' goes on in its thread" in caplog.text
    finally:
        go_on.set()
    await async_until(lambda: user_code.threads_left() == before)
    rewards, _ = await Scorer(hangs).score({}, ["text"])
    assert rewards.tolist() == [1.0]

"""What functions of users do to a run: they fail alone, and are named with their file and line."""

import asyncio
import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from replay_client.errors import ReplayError
from replay_client.settings import load_function
from replay_client.testing import async_until
from replay_client.waits import in_daemon_thread
from replay_generator import GeneratorConfig, PromptError, RolloutGenerator
from replay_generator.rewards.functions import Reward, RewardError, Scorer, group_reward
from replay_generator.rollouts.rollout import Rollout, single_turn
from replay_generator.rollouts.tool_loop import tool_loop
from replay_generator.testing import ScriptedEngine
from replay_generator.user_code import calls as user_code
from replay_generator.user_code.calls import LoopWatch, UserCodeError, call, run
from tests.generator import user_functions
from tests.generator.environments.test_tool_loop import CHAT, Talking
from tests.generator.test_stages import between, sizes
from tests.kit.clients import RecordingClient
from tests.kit.clocks import stopped_clock
from tests.kit.generators import generate, make_prompts, played

ENDINGS = {
    "exits": "SystemExit: 3",
    "interrupts": "KeyboardInterrupt: enough",
    "cancels": "CancelledError: mine",
    "exits_later": "SystemExit: 3",
    "interrupts_later": "KeyboardInterrupt: enough",
    "cancels_later": "CancelledError: mine",
    "exits_in_a_task": "SystemExit: 3",
    "cancels_in_a_task": "CancelledError: mine",
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
        group_filter=getattr(user_functions, name),
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
        ("import missing_module", r"raised ModuleNotFoundError: .*missing_module.* \(.*odd_module\.py, line 2\)"),
        ("math.missing", r"raised AttributeError: .*missing.* \(.*odd_module\.py, line 2\)"),
    ],
)
def test_a_module_that_cannot_be_imported_is_named_with_its_line(tmp_path, monkeypatch, line, says):
    (tmp_path / "odd_module.py").write_text(f"import math\n{line}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "odd_module", raising=False)
    with pytest.raises(ValueError, match=f"reward 'odd_module:f': its module cannot be imported, for it {says}"):
        load_function("reward", "odd_module:f", {})


@pytest.mark.parametrize("name", ["missing_module:f", "missing_package.module:f", "math.missing:f", "math:missing"])
def test_a_name_that_leads_nowhere_is_no_failed_import(name):
    with pytest.raises(ValueError, match=f"reward '{name}': (No module named|module 'math' has no attribute)"):
        load_function("reward", name, {})


async def test_a_reward_that_yields_is_called_where_the_guard_is_and_not_on_the_event_loop():
    threads = []

    @group_reward
    def lazy(row: Any, texts: list[str]) -> Any:
        for text in texts:
            threads.append(threading.current_thread())
            yield float(len(text))

    @group_reward
    def mapped(row: Any, texts: list[str]) -> Any:
        return map(float, map(len, texts))

    assert await scored(lazy, mapped) == [2.0, 4.0, 6.0]
    assert threading.main_thread() not in threads


@pytest.mark.parametrize("name", PLAIN)
async def test_a_reward_that_ends_the_process_while_it_yields_has_failed_with_its_line(name):
    @group_reward
    def lazy(row: Any, texts: list[str]) -> Any:
        yield getattr(user_functions, name)()

    with pytest.raises(RewardError, match=rf"reward function 'lazy' raised {ENDINGS[name]} \(.*\.py, line \d+\)$"):
        await scored(lazy)


async def test_a_grader_that_yields_and_asks_for_signals_scores_as_in_a_script():
    assert await scored(user_functions.yielding_grader, texts=ANSWERS[:3]) == IN_A_SCRIPT[:3]


# ------------------------------------------------------------------------------------------------ odd ends and numbers


@pytest.mark.parametrize(
    ("raises", "says"),
    [
        (lambda: sys.exit("done with it"), "SystemExit: done with it"),
        (lambda: sys.exit(), "SystemExit: "),
        (lambda: exit(), "SystemExit: None"),
        (lambda: _raise(GeneratorExit("gone")), "GeneratorExit: gone"),
        (lambda: _raise(KeyboardInterrupt()), "KeyboardInterrupt: "),
        (lambda: _raise(asyncio.CancelledError()), "CancelledError: "),
        (lambda: _raise(BaseExceptionGroup("all", [SystemExit(4)])), "SystemExit: 4"),
        (lambda: next(iter(())), "RuntimeError: StopIteration"),
    ],
    ids=["text", "nothing", "exit", "GeneratorExit", "KeyboardInterrupt", "CancelledError", "a group", "StopIteration"],
)
@pytest.mark.parametrize("is_async", [False, True])
async def test_whatever_a_function_raises_is_the_error_of_its_call(raises, says, is_async):
    def now(row: Any, text: str) -> Any:
        return raises()

    async def later(row: Any, text: str) -> Any:
        await asyncio.sleep(0)
        return raises()

    if is_async and "StopIteration" in says:
        says = "RuntimeError: coroutine raised StopIteration"
    with pytest.raises(RewardError, match=f"reward function '(now|later)' raised {says}"):
        await scored(later if is_async else now)


def _raise(error: BaseException) -> None:
    raise error


class Odd:
    """What a user may return, with an `item` that fails."""

    def item(self) -> float:
        return 1.0

    def __float__(self) -> float:
        raise KeyError("mine")


NUMBERS = {
    "an int": (1, 1.0),
    "a bool": (True, 1.0),
    "numpy": (np.float32(0.5), 0.5),
    "numpy int": (np.int64(2), 2.0),
    "numpy bool": (np.True_, 1.0),
    "an array": (np.array(0.5), 0.5),
    "a tensor": (torch.tensor(0.5), 0.5),
    "a tensor with a gradient": (torch.tensor([0.5], requires_grad=True), 0.5),
    "bfloat16": (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
    "a fraction": (Fraction(1, 2), 0.5),
    "a decimal": (Decimal("0.5"), 0.5),
}
NO_NUMBERS = {
    "a text": "1.0",
    "bytes": b"1.0",
    "a text of numpy": np.str_("1.0"),
    "an array of a text": np.array("1.0"),
    "a list": [1.0],
    "a complex": 1j,
    "huge": 10**400,
    "two": torch.tensor([1.0, 2.0]),
    "an object": object(),
    "a dict": {"reward": 1.0},
    "odd": Odd(),
    "a day": np.datetime64("2020-01-01"),
}
NOT_FINITE = {
    "NaN": math.nan,
    "infinite": math.inf,
    "NaN of numpy": np.float32("nan"),
    "NaN tensor": torch.tensor(math.nan),
}


async def given_by_reward(value: Any) -> float:
    (one,) = await scored(lambda row, text: value, texts=("a",))
    return one


async def given_by_group_reward(value: Any) -> float:
    (one,) = await scored(group_reward(lambda row, texts: [value]), texts=("a",))
    return one


async def given_by_hook(value: Any) -> float:
    async def hook(task: Any, policy: Any) -> Rollout:
        rollout = await single_turn(task, policy)
        rollout.reward = value
        return rollout

    client = RecordingClient()
    await generate(client, ScriptedEngine(), hook, reward=None, group_size=2)
    return float(client.inserts[0][0].rewards[0])


async def given_by_priority(value: Any) -> float:
    client = RecordingClient()
    await generate(client, ScriptedEngine(), single_turn, priority=lambda group: value)
    (priority,) = client.inserts[0][1].values()
    return float(priority)


DOORS = [given_by_reward, given_by_group_reward, given_by_hook, given_by_priority]


@pytest.mark.parametrize(("value", "number"), NUMBERS.values(), ids=NUMBERS)
@pytest.mark.parametrize("given", DOORS)
async def test_a_number_is_a_number_whatever_its_type(given, value, number):
    assert await given(value) == number


@pytest.mark.parametrize("value", [*NO_NUMBERS.values(), *NOT_FINITE.values()], ids=[*NO_NUMBERS, *NOT_FINITE])
@pytest.mark.parametrize("given", DOORS)
async def test_what_is_no_finite_number_is_an_error_that_says_so(given, value):
    with pytest.raises((RewardError, PromptError), match=r"returned |the hook gave the reward ") as caught:
        await given(value)
    assert not isinstance(caught.value, UserCodeError)


async def answer_of(tool: Callable[[], Any]) -> str:
    """What the policy reads of a tool that returns what `tool` returns."""

    def look() -> Any:
        """Looks."""
        return tool()

    engine = Talking(says=['<tool_call>{"name": "look", "arguments": {}}</tool_call>', "done"])
    await played(tool_loop([look]), engine, prompts=CHAT, group_size=1)
    return engine.read[1].rpartition("<s>tool\n")[2].partition("<e>")[0]


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (None, "null"),
        (math.nan, "NaN"),
        (np.float32(0.5), "0.5"),
        (torch.tensor([1.0, 2.0]), "[1.0, 2.0]"),
        ({"a": np.int64(1)}, '{"a": 1}'),
        ("1.0", "1.0"),
        (range(1, 3).__iter__(), "[1, 2]"),
    ],
    ids=["None", "NaN", "numpy", "a tensor", "in a dict", "a text", "an iterator"],
)
async def test_what_a_tool_returns_is_told_as_its_text(value, told):
    assert await answer_of(lambda: value) == told


async def test_what_no_json_can_have_is_the_error_of_the_tool():
    loop: list[Any] = []
    loop.append(loop)
    assert (await answer_of(lambda: loop)).startswith("error: ValueError: Circular reference")
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert (await answer_of(lambda: deep)).startswith("error: RecursionError")

    class Exits:
        def __str__(self) -> str:
            sys.exit(3)

    assert (await answer_of(Exits)).startswith("error: SystemExit: 3")


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
    assert stats["groups_skipped"] == 1
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


def test_code_of_no_user_in_which_the_event_loop_stands_still_is_named_where_it_is(caplog):
    said = threading.Event()
    caplog.handler.addFilter(lambda record: said.set() or True)

    async def main() -> None:
        with LoopWatch(seconds=0.1):
            said.wait(60)

    run(main())
    line = caplog.messages[0]
    assert "in 'wait' (" in line
    assert "in function" not in line


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
from replay_generator.rewards.functions import Scorer
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

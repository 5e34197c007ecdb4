"""ReplayClient has every method of AsyncReplayClient, with its signature and docstring."""

import inspect
import typing

import pytest

from replay_client import AsyncReplayClient, ReplayClient
from replay_client.client import Wake
from tests.kit.clocks import in_a_thread

METHODS = [name for name, _ in inspect.getmembers(AsyncReplayClient, inspect.isfunction) if not name.startswith("_")]
WRAPPED = [name for name in METHODS if inspect.iscoroutinefunction(getattr(AsyncReplayClient, name))]


@pytest.mark.parametrize("name", METHODS)
def test_parameters_are_those_of_the_asyncio_client(name):
    theirs = inspect.signature(getattr(AsyncReplayClient, name)).parameters
    mine = inspect.signature(getattr(ReplayClient, name)).parameters
    assert list(mine.values()) == list(theirs.values())


@pytest.mark.parametrize("name", WRAPPED)
def test_a_blocking_method_has_the_docstring_and_result_of_its_origin(name):
    mine, origin = getattr(ReplayClient, name), getattr(AsyncReplayClient, name)
    assert not inspect.iscoroutinefunction(mine)
    assert mine.__doc__
    assert mine.__qualname__ == f"ReplayClient.{name}"
    assert typing.get_type_hints(mine)["return"] == typing.get_type_hints(origin)["return"]
    if name != "close":
        assert mine.__doc__ == origin.__doc__


def test_constructors_take_the_same():
    for name in ("__init__", "from_env"):
        assert inspect.signature(getattr(ReplayClient, name)) == inspect.signature(getattr(AsyncReplayClient, name))


def test_a_wake_that_is_set_twice_wakes_once():
    wake = Wake()
    wake.set()  # several shards may each set the wake of one writer
    wake.set()
    wake.wait()
    waiting = in_a_thread(wake.wait)
    with pytest.raises(TimeoutError):
        waiting.result(0.01)
    wake.set()
    waiting.result(60.0)

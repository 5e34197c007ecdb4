"""Budget: never more than there is, never over half to one, and everybody in turn. MemoryGuard: in time."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay_server.errors import Refused
from replay_server.rpc.limits import Budget
from replay_server.telemetry.host import Memory, MemoryGuard


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 60)), max_size=30), st.data())
def test_a_budget_never_gives_more_than_there_is_nor_half_of_it_to_one_who_has_some(wishes, data):
    budget, held = Budget(100, "things"), []
    for client, n in wishes:
        mine = sum(amount for who, amount in held if who == client)
        fits = sum(amount for _, amount in held) + n <= 100 and (not mine or mine + n <= 50)
        if fits:
            budget.acquire(client, n)
            held.append((client, n))
        else:
            with pytest.raises(Refused, match="things"):
                budget.acquire(client, n)
        if held and data.draw(st.booleans()):
            budget.release(*held.pop(data.draw(st.integers(0, len(held) - 1))))
        assert budget.used == sum(amount for _, amount in held) <= 100
        budget.check()
    for client, n in held:
        budget.release(client, n)
    assert budget.used == 0
    assert all(budget.why_not(client, 100) is None for client in "abc")


def make_budget(total: int = 100) -> Budget:
    return Budget(total, "things")


async def holder(budget: Budget, client: str, n: int, order: list[str], release: asyncio.Event, timeout=None) -> None:
    await budget.take_in_turn(client, n, timeout)
    try:
        order.append(client)
        await release.wait()
    finally:
        budget.release(client, n)


async def let_run() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_the_first_in_line_is_served_first_even_if_a_later_one_would_fit():
    budget, order, first, rest = make_budget(), [], asyncio.Event(), asyncio.Event()
    tasks = [asyncio.create_task(holder(budget, "a", 90, order, first))]
    await let_run()
    for client, n in (("b", 60), ("c", 5), ("d", 30)):
        tasks.append(asyncio.create_task(holder(budget, client, n, order, rest)))
    await let_run()
    assert order == ["a"]
    first.set()
    await let_run()
    assert order == ["a", "b", "c", "d"]
    rest.set()
    await asyncio.gather(*tasks)
    assert budget.used == 0


async def test_a_client_that_gives_up_makes_way_for_the_next():
    budget, order, release = make_budget(), [], asyncio.Event()
    tasks = [
        asyncio.create_task(holder(budget, client, n, order, release))
        for client, n in (("a", 60), ("b", 90), ("c", 40))
    ]
    await let_run()
    assert order == ["a"]
    tasks[1].cancel()
    await let_run()
    assert order == ["a", "c"]
    release.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert budget.used == 0


async def test_what_is_granted_to_one_that_is_cancelled_just_then_goes_back():
    budget, order, first, rest = make_budget(), [], asyncio.Event(), asyncio.Event()
    one = asyncio.create_task(holder(budget, "a", 100, order, first))
    two = asyncio.create_task(holder(budget, "b", 100, order, rest))
    await let_run()
    budget.release("a", 100)  # grants to b, whose task has not run yet
    two.cancel()
    await asyncio.gather(two, return_exceptions=True)
    assert order == ["a"]
    assert budget.used == 0
    budget.acquire("a", 100)
    first.set()
    await one
    assert budget.used == 0


@pytest.mark.parametrize("piece", [1000, 10_000])
def test_no_client_is_so_fast_that_it_fills_the_memory_that_stays_free_between_two_looks(piece):
    left = 1_000_000
    guard = MemoryGuard(0.9, look=lambda: [Memory("the test", 1_000_000, left)])
    while left > 0:  # all of it takes a moment: no look is due by the clock
        left -= piece
        if guard.why_full(piece) is not None:
            break
    assert 100_000 - 2 * piece <= left < 100_000

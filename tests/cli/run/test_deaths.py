"""How a run counts the deaths of a part."""

from replay_cli.run.runner import Deaths


def test_deaths_are_counted_anew_after_a_new_step_of_the_trainer():
    deaths = Deaths()
    deaths.add(0)
    deaths.add(0)
    assert deaths.count == 2
    deaths.add(1)
    assert deaths.count == 1
    deaths.add(1)
    assert deaths.count == 2

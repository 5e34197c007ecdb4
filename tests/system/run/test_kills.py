"""The scenarios of `tests.system.kills` in which `replay run` or its parts are killed or stopped.

They take most of half an hour, so they are in a file of their own: the long tests are shared out by file.
"""

import pytest

from tests.system.test_kills import PARAMETERS, SCENARIOS_OF_A_RUN, case, played

pytestmark = pytest.mark.timeout(900)

CASES = [
    case(
        "a run whose parts are killed ends by itself with each step once",
        "parts-of-a-run",
        3,
        seed=1,
        exactly={"kills": 3},
    ),
    case(
        "eight kills of parts lose no group and repeat no step",
        "parts-of-a-run",
        8,
        pytest.mark.timeout(3600),
        seed=4,
        exactly={"kills": 8},
    ),
    case("a killed run is finished by the same command", "runs", 1, seed=5, exactly={"kills": 1}),
    case(
        "a killed run leaves no process, not even one that ignores SIGTERM",
        "runs",
        2,
        seed=2,
        stubborn=True,
        exactly={"kills": 2},
    ),
    case("a run that is stopped repeats no step", "stopped-runs", 2, seed=3, exactly={"stops": 2}),
    case(
        "five stops of a run lose no group and repeat no step",
        "stopped-runs",
        5,
        pytest.mark.timeout(3600),
        seed=6,
        exactly={"stops": 5},
    ),
]


@pytest.mark.long
@pytest.mark.parametrize(PARAMETERS, CASES)
def test_a_run_loses_no_group_and_repeats_no_step(tmp_path, scenario, count, seed, exactly, at_least, options):
    played(tmp_path, scenario, count, seed, exactly, at_least, options)


def test_every_scenario_of_a_run_has_a_case():
    assert {case.values[0] for case in CASES} == SCENARIOS_OF_A_RUN

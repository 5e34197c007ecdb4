"""verl's real trainers, agent loop and workers, with Ray and TransferQueue, killed again and again.

verl needs other versions of what we use, so it runs in an environment of its own: see test_verl.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from replay_client.testing import until
from tests.adapters.killed_verl import BATCH, LONGEST, PROMPTS, TABLE, Ledger, begin, kill_and_resume, prepare
from tests.adapters.test_verl import python_with_verl
from tests.kit.processes import server_process

# The limit is a guard against hanging: each start imports verl in four processes, and some starts come late.
pytestmark = [pytest.mark.long, pytest.mark.timeout(7200)]
RUNS = {"sync": (40, 10), "separate_async": (40, 10), "colocate_async": (12, 3)}
"""By `trainer.v1.trainer_mode`: the steps and the kills of a run."""


@pytest.fixture(scope="module", params=RUNS)
def ledger(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ledger]:
    """What became of the groups of a run that was killed again and again."""
    python = python_with_verl()
    folder = tmp_path_factory.mktemp(request.param)
    prepare(folder)
    steps, kills = RUNS[request.param]
    with server_process(folder, TABLE) as server:
        yield kill_and_resume(python, folder, server.address, request.param, steps, kills)


def test_no_finished_group_is_generated_again(ledger):
    assert (ledger.steps, ledger.kills) == RUNS[ledger.mode]
    assert ledger.found_groups > 0
    assert ledger.tokens_again <= 0.02 * ledger.acknowledged_tokens


def test_each_fetch_of_a_prompt_is_trained_on_once(ledger):
    assert len(ledger.trained) == ledger.steps * BATCH
    assert ledger.trained_twice() == []
    uids = [uid for uid, _ in ledger.fetched]
    trained = [uid for _, uid, _ in ledger.trained]
    assert sorted(uids) == sorted([*trained, *ledger.waiting])
    assert all(epoch == list(range(PROMPTS)) for epoch in ledger.epochs())


def test_the_server_lets_go_of_what_was_trained_on(ledger):
    assert ledger.left <= len(ledger.waiting)


def test_no_row_without_a_prompt_stays_in_transfer_queue(ledger):
    assert ledger.orphans == []


def test_training_goes_on_while_the_server_is_away(tmp_path):
    python = python_with_verl()
    prepare(tmp_path)
    with server_process(tmp_path, TABLE) as server:
        start = begin(python, tmp_path, server.address, "sync", steps=8, REPLAY_TEST_TIMEOUT="1")
        try:
            until(lambda: start.reached(2), timeout=LONGEST)
            server.kill()
            start.wait()
        finally:
            start.kill()
    _, trained = json.loads((tmp_path / "checkpoints/global_step_8/actor/state.json").read_text())
    assert len(trained) == 8 * BATCH
    assert "the replay server is away" in start.output.read_text()

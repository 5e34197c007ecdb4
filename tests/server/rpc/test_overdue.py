"""Who is gone, and what is a long wait: on a clock of its own, one situation a test."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from replay_server.config import MAX_CLIENTS, MAX_NAME
from replay_server.rpc.clients import ClientRole, Clients
from replay_server.rpc.info import FIRST_STEPS, LONG_WAIT, clients, long_wait, overdue_clients, server_info
from replay_server.tables.config import AdmissionConfig, TableConfig, with_named
from replay_server.tables.extensions.admission import Admission
from replay_server.tables.table import SampleRequest
from tests.kit.tables import replay_buffer, rows_of


def context(name: str) -> SimpleNamespace:
    metadata = (("user-agent", f"replay/{name} grpc-python-asyncio/1.80.0"),)
    return SimpleNamespace(invocation_metadata=lambda: metadata, peer=lambda: f"connection of {name}")


class Run:
    """A trainer and a generator at a buffer whose clock the test moves. They have done some steps."""

    def __init__(
        self,
        *,
        tables=({"name": "rollouts"},),
        admission=None,
        names=("train:1", "gen:1"),
        steps=0,
        seconds=30.0,
    ) -> None:
        self.now = 1000.0
        self.trainer, self.generator = names
        configs = with_named(None, [TableConfig(**table) for table in tables])
        self.buffer = replay_buffer(configs, lambda: self.now, admission=admission)
        self.clients = Clients(lambda: self.now)
        self.version = self.key = 0
        for _ in range(steps):
            self.step(seconds)

    def insert(self, table="rollouts", name=None):
        self.key += 1
        with self.clients.calling(context(self.generator if name is None else name), ClientRole.GENERATOR):
            self.buffer.insert(rows_of([self.key], {table: 1.0}, version=self.version))

    def sample(self, table="rollouts"):
        with self.clients.calling(context(self.trainer), ClientRole.TRAINER):
            pending = self.buffer.sample(table, SampleRequest(1, 1))
            self.buffer.acknowledge(pending.result()[0])

    def publish(self):
        self.version += 1
        with self.clients.calling(context(self.trainer), ClientRole.TRAINER):
            self.buffer.set_policy_version(self.version, "")

    def step(self, seconds=30.0, publish=True):
        for _ in range(8):
            self.insert()
        self.sample()
        self.now += seconds
        if publish:
            self.publish()

    def gone(self):
        return [(overdue.role, overdue.table) for overdue in overdue_clients(self.buffer, self.clients)]


def test_an_archiver_that_waits_for_groups_hides_nobody_who_is_gone():
    run = Run(tables=[{"name": "rollouts", "copy_to": "archive"}], steps=6, seconds=31.0)
    run.buffer.acknowledge(run.buffer.sample("archive", SampleRequest(48, 48)).result()[0])
    waiting = run.buffer.sample("archive", SampleRequest(1, 1))
    run.now += 200.0
    assert run.gone() == [("trainer", ""), ("generator", "rollouts")]
    assert not waiting.done


def test_three_usual_intervals_after_the_last_sign_both_sides_are_gone_by_name():
    run = Run(steps=6, seconds=31.0)
    run.now += 92.0
    assert run.gone() == [("generator", "rollouts")]  # its last burst was a step before the version
    run.now += 2.0
    trainer, generators = overdue_clients(run.buffer, run.clients)
    assert (
        trainer.reason
        == "no new policy version since version 6, for 94 s (usually every 31 s); last seen: train:1 (94 s ago)"
    )
    assert generators.reason == (
        "nobody has inserted into rollouts for 125 s (usually every 31 s); last seen: gen:1 (125 s ago)"
    )


def test_pauses_of_a_run_do_not_change_what_is_usual():
    run = Run(steps=40, seconds=15.7)
    for pause in (60.0, 40.0, 90.0, 45.0):
        run.step(pause)
    run.now += 90.0
    trainer, generators = overdue_clients(run.buffer, run.clients)
    assert "for 90 s (usually every 16 s);" in trainer.reason
    assert "(usually every 16 s);" in generators.reason
    assert server_info(run.buffer, ()).tables[0].inserted.interval == pytest.approx(15.7)


def test_who_was_connected_until_it_died_is_seen_last_when_it_died():
    run = Run(steps=6)
    with run.clients.calling(context("gen:1"), ClientRole.GENERATOR):
        run.now += 326.0
    run.now += 132.0
    generators = list(overdue_clients(run.buffer, run.clients))[-1]
    assert generators.reason == (
        "nobody has inserted into rollouts for 488 s (usually every 30 s); last seen: gen:1 (132 s ago)"
    )
    assert {client.name: client.age for client in clients(run.buffer, run.clients)}["gen:1"] == 132.0


def test_long_steps_are_no_silence():
    run = Run(steps=6, seconds=300.0)
    run.now += 500.0
    assert run.gone() == []
    assert long_wait(run.buffer, run.clients) == 900.0


def test_short_steps_leave_time_for_a_pause():
    run = Run(steps=50, seconds=0.5)
    run.now += LONG_WAIT - 1
    assert run.gone() == []
    run.now += 2
    assert run.gone() == [("trainer", ""), ("generator", "rollouts")]


def test_whose_connection_is_closed_is_gone_however_long_the_pauses_were_before():
    run = Run(steps=2)
    with ExitStack() as connected:
        for name, side in (
            ("train:1", ClientRole.TRAINER),
            ("gen:1", ClientRole.GENERATOR),
            ("gen:2", ClientRole.GENERATOR),
        ):
            connected.enter_context(run.clients.calling(context(name), side))
        for _ in range(6):
            run.now += 600.0
            run.step()
        with run.clients.calling(context("gen:2"), ClientRole.GENERATOR):
            connected.close()
            run.now += 100.0
            assert run.gone() == [("trainer", "")]
    run.now += LONG_WAIT - 1
    assert run.gone() == [("trainer", "")]  # a connection that is cut comes back within that time
    run.now += 2.0
    trainer, generators = overdue_clients(run.buffer, run.clients)
    assert trainer.reason == "the last trainer closed its connection 121 s ago; last seen: train:1 (121 s ago)"
    assert generators.reason.startswith("the last generator closed its connection 21 s ago; last seen: gen:2 (")
    run.insert()  # it does not say whether it will be connected
    assert run.gone() == [("trainer", "")]


def test_nobody_is_gone_before_the_rhythm_is_known():
    run = Run(steps=3)
    run.now += 10_000.0
    assert run.gone() == []


def test_whose_request_waits_is_there():
    run = Run(tables=[{"name": "rollouts", "rate_limiter": {"type": "queue", "max_size": 64}}], steps=6)
    while run.buffer.tables["rollouts"].size:
        run.sample()
    run.buffer.sample("rollouts", SampleRequest(1, 1))
    run.now += 300.0
    assert run.gone() == [("generator", "rollouts")]


def test_generators_that_wait_for_permits_are_there():
    run = Run(admission=AdmissionConfig(fresh_groups_per_step=8, max_staleness=1), steps=6)
    Admission.of(run.buffer).acquire(1000, float("inf"))
    run.now += 300.0
    assert run.gone() == [("trainer", "")]


def test_prompts_that_generators_load_and_draw_tell_nothing_of_a_trainer():
    run = Run(tables=[{"name": "rollouts"}, {"name": "prompts"}])
    run.clients.describe(context("gen:1"), {"part": '"generator"', "prompts_table": '"prompts"'})
    for _ in range(6):
        run.insert("prompts")
        run.step()
    for _ in range(20):  # groups go on, and no prompt has to be loaded
        run.step()
    assert run.gone() == []
    run.now += 300.0
    assert run.gone() == [("trainer", ""), ("generator", "rollouts")]


def test_who_says_that_it_ends_is_not_missed_until_it_comes_back():
    run = Run(steps=6)
    run.clients.leave(context("train:1"))
    run.clients.leave(context("gen:1"))
    run.now += 300.0
    assert run.gone() == []
    run.insert()
    run.now += 300.0
    assert run.gone() == [("generator", "rollouts")]


def test_the_age_of_a_client_that_has_ended_counts_from_its_end():
    run = Run(steps=1)
    run.now += 300.0
    run.clients.leave(context("train:1"))
    run.now += 50.0
    ages = {client.name: client.age for client in clients(run.buffer, run.clients)}
    assert ages == {"train:1": 50.0, "gen:1": 380.0}


def test_one_generator_of_two_that_was_killed_is_missed_though_the_other_ended_before():
    run = Run()
    for _ in range(6):
        run.insert(name="gen:2")
        run.step()
    run.clients.leave(context("gen:2"))
    run.insert()
    run.publish()
    run.now += 300.0
    (trainer, generators) = overdue_clients(run.buffer, run.clients)
    assert trainer.role == "trainer"
    assert generators.reason.endswith("last seen: gen:1 (300 s ago)")


def test_a_run_ends_well_though_a_generator_was_killed_and_replaced_on_the_way():
    run = Run()
    for _ in range(3):
        run.insert(name="killed:1")
        run.step()
    for _ in range(3):
        run.step()
    run.clients.leave(context("gen:1"))
    run.clients.leave(context("train:1"))
    run.now += 300.0
    assert run.gone() == []


def test_a_trainer_that_publishes_nothing_is_judged_by_its_samples_and_a_pool_may_rest():
    rollouts = {"name": "rollouts", "sampler": "fifo", "max_times_sampled": 1, "forward_to": "pool"}
    run = Run(tables=[rollouts, {"name": "pool"}])
    for _ in range(6):
        run.step(publish=False)
        run.sample("pool")
    run.now += 60.0
    run.insert()
    run.sample()
    run.now += 60.0
    assert run.gone() == []  # the pool was not sampled for four intervals, the queue was
    run.now += 40.0
    assert run.gone() == [("trainer", "rollouts"), ("generator", "rollouts")]


def test_a_client_without_a_name_is_never_missed():
    run = Run(names=("", ""), steps=6)
    run.now += 300.0
    assert run.gone() == []


@pytest.mark.parametrize(
    ("here", "seconds"), [((), LONG_WAIT), ((ClientRole.TRAINER,), LONG_WAIT), (tuple(ClientRole), FIRST_STEPS)]
)
def test_before_the_rhythm_is_known_a_wait_is_long_sooner_if_the_other_side_never_came(here, seconds):
    run = Run()
    for role in here:
        with run.clients.calling(context(role), role):
            pass
    assert long_wait(run.buffer, run.clients) == seconds


def test_names_and_their_number_are_bounded_and_the_one_seen_longest_ago_goes_first():
    clients = Clients(lambda: 0.0)
    for number in range(MAX_CLIENTS + 2):
        with clients.calling(
            context(f"first{'x' * 1000}" if number == MAX_CLIENTS else f"n{number}"), ClientRole.TRAINER
        ):
            pass
        with clients.calling(context("n0"), ClientRole.TRAINER):
            pass
    names = [client.name for client in clients]
    assert len(names) == MAX_CLIENTS
    assert "n0" in names
    assert "n1" not in names
    assert max(map(len, names)) == MAX_NAME


@pytest.mark.parametrize("hours", [0, 1, 24 * 30])
def test_a_client_that_left_is_known_as_long_as_the_server_runs(hours):
    """A trainer ends only if all who brought groups have left, for ten minutes: by then nobody may be forgotten."""
    run = Run()
    with run.clients.calling(context("gen:1"), ClientRole.GENERATOR):
        run.clients.leave(context("gen:1"))
    run.now += hours * 3600
    with run.clients.calling(context("train:1"), ClientRole.TRAINER):
        pass
    known = {client.name: client.ended for client in run.clients}
    assert known == {"gen:1": True, "train:1": False}

"""What errors and waits say: few names, and which side is silent."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from replay_server import AdmissionConfig, Config, TableConfig
from replay_server.errors import FEW_TABLES, Refused
from replay_server.tables.extensions.admission import Admission
from replay_server.tables.outstanding import why_never
from replay_server.tables.table import SampleRequest
from tests.kit.tables import replay_buffer


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_an_error_names_few_of_many_tables_and_those_are_the_nearest():
    buffer = replay_buffer([TableConfig(name=f"rollouts-{number}") for number in range(10_000)], Clock())
    with pytest.raises(Refused) as caught:
        buffer.table("rollout-77")
    message = caught.value.message
    assert message.startswith("no table 'rollout-77'; there are 10000 tables, such as rollouts-77")
    assert message.count("rollouts-") == FEW_TABLES
    assert len(message) < 300


def test_a_configuration_of_many_tables_gets_short_errors():
    many = [TableConfig(name=f"t{number}") for number in range(10_000)]
    with pytest.raises(ValueError, match="2 tables are called 't7'") as caught:
        Config(tables=[*many, TableConfig(name="t7")])
    assert len(str(caught.value)) < 1000
    with pytest.raises(ValueError, match="forwards to 't77x', which does not exist; there are 10001 tables") as caught:
        Config(tables=[*many, TableConfig(name="queue", forward_to="t77x")])
    assert len(str(caught.value)) < 500


def test_a_long_wait_says_that_the_other_side_is_silent_and_that_generators_lack_permits():
    clock = Clock()
    admission = AdmissionConfig(fresh_groups_per_step=1, max_staleness=0)
    buffer = replay_buffer([TableConfig(name="rollouts")], clock, admission=admission)
    waiting = buffer.sample("rollouts", SampleRequest(num_samples=2, min_samples=2))
    assert buffer.why_waiting(waiting).endswith("(size 0 < min_size 1)")
    Admission.of(buffer).acquire(1, math.inf)
    Admission.of(buffer).acquire(1, math.inf)
    clock.now = 31.0
    assert buffer.why_waiting(waiting).endswith(
        "(size 0 < min_size 1); nobody inserted for 31 s, and generators wait for permits (1)"
    )


def test_distinct_samples_that_a_full_table_has_may_be_awaited_and_one_more_is_refused():
    table = replay_buffer([TableConfig(name="pool", sampler="uniform", max_size=3)], Clock()).table("pool")
    all_of_it = SampleRequest(num_samples=3, min_samples=3, distinct=True)
    assert why_never(table, all_of_it) is None
    refused = why_never(table, replace(all_of_it, num_samples=4, min_samples=4))
    assert refused is not None
    assert refused.message == "4 distinct samples of table 'pool' can never be there: its max_size is 3"
    assert why_never(table, replace(all_of_it, num_samples=4, min_samples=4, distinct=False)) is None

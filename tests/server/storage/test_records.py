"""Which damaged records of the state a start can do without."""

import pytest

from replay_server.storage.records import LEASE, POLICY, REMEMBERED, SCOPE, State, pack

DAMAGED = pack({"version": 7})[:-1]


@pytest.mark.parametrize("name", [SCOPE + b"1", LEASE + b"1", REMEMBERED + b"1"])
def test_a_damaged_record_that_a_start_can_do_without_is_left_out(name):
    state = State({name: DAMAGED, POLICY: pack(7)})
    assert state.values == {POLICY: 7}
    assert state.damaged == [name]


def test_a_damaged_record_of_the_policy_is_refused():
    state = State({POLICY: DAMAGED})
    with pytest.raises(ValueError, match="the record 'policy' is damaged"):
        _ = state.values

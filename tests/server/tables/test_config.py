"""Configuration in Python: what is wrong with it is one line, as for a file."""

import re

import pytest

from replay_server import AdmissionConfig, ReplayServer, TableConfig


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: TableConfig(name="a", samplr="fifo"), "TableConfig: there is no 'samplr'; did you mean 'sampler'?"),
        (
            lambda: TableConfig(name="a", rate_limiter={"type": "queue"}),
            "TableConfig: rate_limiter: 'queue' needs max_size, for example { type = 'queue', max_size = 512 }",
        ),
        (
            lambda: TableConfig(name="a", max_size=0),
            "TableConfig: max_size must be at least 1, not 0",
        ),
        (
            lambda: AdmissionConfig(fresh_groups_per_step=4),
            "AdmissionConfig: max_staleness is needed",
        ),
        (
            lambda: TableConfig(name="pool", retain_consumed=2),
            "TableConfig: table 'pool': retain_consumed = 2 is for a table whose items leave when they are sampled: "
            "make it a queue or stack (max_times_sampled = 1), or leave retain_consumed out",
        ),
        (
            lambda: ReplayServer([TableConfig(name="a", forward_to="b")], port=0),
            "Config: table 'a' forwards to 'b', which does not exist; tables: a",
        ),
        (
            lambda: ReplayServer([TableConfig(name="a")], port=99999),
            "ServerConfig: listen must be host:port, for example 127.0.0.1:7401, and the port at most 65535, "
            "not '127.0.0.1:99999'",
        ),
    ],
)
def test_an_error_has_one_line_with_the_name_the_value_and_the_remedy(make, line):
    with pytest.raises(ValueError, match=f"^{re.escape(line)}$"):
        make()


@pytest.mark.parametrize(
    ("requires", "message"),
    [
        ("value", "requires must be a list, not 'value'"),
        (["value", "value"], "table 't': requires names one twice: value, value"),
        ([""], "requires.0 must have at least 1 character"),
        ([f"c{n}" for n in range(17)], "requires must have at most 16 items"),
        (["x" * 257], "requires.0 must have at most 256 characters, not 'x{100}'"),
    ],
    ids=["a word", "a name twice", "no name", "too many", "a name that is too long"],
)
def test_what_a_table_requires_is_a_short_list_of_names(requires, message):
    with pytest.raises(ValueError, match=message) as refusal:
        TableConfig(name="t", requires=requires)
    assert "\n" not in str(refusal.value)

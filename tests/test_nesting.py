"""Whatever a user, a peer or a model sends may be nested 100,000 deep: it is refused, or cut, and ends no process."""

import json

import msgpack
import pytest

from replay_cli.data_rows import group_of
from replay_cli.options import json_or_word
from replay_cli.run.run_file import read_run_file
from replay_client.access import Access
from replay_generator.rollouts.environments import load_environment
from replay_generator.rollouts.tool_loop import json_calls
from replay_protos.state import TOO_DEEP, plain
from replay_server.config import Config

DEEP = 100_000
JSON = "[" * DEEP + "]" * DEEP
TOML = f"name = {JSON}"


def nested(depth: int) -> list:
    value: list = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("depth", [200, 1000, DEEP])
def test_a_value_that_is_shown_is_cut_where_it_is_nested_too_deeply(depth):
    shown = json.dumps(plain({"info": nested(depth), "reward": 1.0}))
    assert TOO_DEEP in shown
    assert shown.endswith('"reward": 1.0}')


def test_a_value_that_msgpack_still_reads_is_shown_too():
    stored = msgpack.unpackb(b"\x91" * 1000 + b"\x01")
    assert TOO_DEEP in json.dumps(plain(stored))


def test_what_is_nested_as_deep_as_a_row_may_be_is_shown_whole():
    assert plain(nested(64)) == nested(64)


@pytest.mark.parametrize(
    "read",
    [Config.load, read_run_file, lambda path: Access.find(environment={}, client_config=str(path))],
    ids=["server", "run file", "client"],
)
def test_a_file_of_settings_that_is_nested_without_end_is_refused(tmp_path, read):
    path = tmp_path / "settings.toml"
    path.write_text(TOML)
    with pytest.raises(ValueError, match=r"settings\.toml.*nested too deeply"):
        read(path)


def test_a_set_option_that_is_nested_without_end_is_text():
    assert json_or_word(JSON) == JSON


def test_a_run_file_takes_a_set_option_that_is_nested_as_deep_as_json_reads(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("")
    deep = "[" * 900 + "]" * 900
    with pytest.raises(ValueError, match="there is no 'thing'"):
        read_run_file(path, [f"thing={deep}"])


def test_a_row_of_data_with_an_object_that_is_nested_without_end_is_refused():
    with pytest.raises(ValueError, match="nested too deeply"):
        group_of([{"prompt_ids": [1], "completion_ids": [2], "reward": 1.0, "sampling": JSON}])


def test_arguments_of_an_environment_that_are_nested_without_end_are_refused():
    with pytest.raises(ValueError, match="environment_args must be a JSON object"):
        load_environment("verifiers:any", JSON)


def test_a_call_of_the_model_that_is_nested_without_end_is_no_call():
    with pytest.raises(ValueError, match="not a call"):
        json_calls(f"<tool_call>{JSON}</tool_call>")

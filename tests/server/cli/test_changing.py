"""`update`, `delete`, `reset`, `policy set`: they do what they say, and ask first where something would be lost."""

import json
import shlex
import subprocess

import pytest

from replay_server.cli.bench import measure
from tests.commands import COMMAND, fails, run_replay


def config_of(client, table):
    return json.loads(client.server_info().tables[table].config)


def test_update_changes_fields_and_says_from_what_to_what(client, replay):
    result = replay(
        *("update", "replay", "max_size=32", "max_staleness=null", "max_bytes=2MiB", "sampler=uniform"),
        'rate_limiter={"type": "min_size", "min_size": 3}',
    )
    assert result.returncode == 0, result.stderr
    assert "replay.max_size: 16 -> 32\n" in result.stdout
    assert "replay.max_bytes: null -> 2097152\n" in result.stdout
    config = config_of(client, "replay")
    assert (config["max_size"], config["max_staleness"], config["sampler"]["type"]) == (32, None, "uniform")
    assert config["rate_limiter"]["min_size"] == 3
    assert "nothing changed" in replay("update", "replay", "max_size=32").stdout


@pytest.mark.parametrize(
    ("command", "status", "words"),
    [
        ("tables --nonsense", 2, "No such option: --nonsense; see `replay tables --help`"),
        ("items", 2, "Missing argument"),
        ("items nope", 1, "tables: rollouts, replay"),
        ("show 5", 1, "this server holds no item 5"),
        ("show five", 2, "'five' is not a key"),
        ("top", 2, "replay tables"),
        ("update replay max_sise=3", 2, "no field 'max_sise'; fields: name, sampler"),
        ("update replay max_size", 2, "max_size"),
        ("update replay max_size=-1", 1, "max_size: Input should be greater than or equal to 1, not -1"),
        ("update replay max_bytes=0", 1, "max_bytes: Input should be greater than or equal to 1, not 0"),
        ("update replay max_staleness=-3", 1, "max_staleness: Input should be greater than or equal to 0, not -3"),
        ("policy set 6 --yes", 1, "below the current 7"),
        ("reset --yes", 2, "--all"),
        ("reset replay --all --yes", 2, "--all"),
        *(
            (command, 2, "say --yes to do it")
            for command in (
                "delete replay 1",
                "reset replay",
                "reset --all",
                "update replay max_size=1",
                "update replay max_bytes=2",
                "policy set 0 --rollback",
            )
        ),
        ("export replay x.csv", 2, "must end with .jsonl or .parquet"),
        ("export nope x.jsonl", 1, "no table 'nope'"),
        ("import absent.jsonl", 1, "No such file"),
    ],
)
def test_what_a_command_cannot_or_may_not_do_is_one_line_and_changes_nothing(
    client, tmp_path, monkeypatch, command, status, words
):
    monkeypatch.chdir(tmp_path)
    client.set_policy_version(7)
    for _ in range(4):
        client.insert(b"x", {"replay": 1.0}, policy_version=7)
    assert words in fails(*command.split(), status=status, address=client.address)
    assert (client.server_info().tables["replay"].size, client.policy().version) == (4, 7)
    assert list(tmp_path.iterdir()) == []


def test_what_loses_items_is_done_with_a_yes(client, replay):
    keys = [client.insert(b"x", {"replay": 1.0, "rollouts": 1.0}) for _ in range(4)]
    assert replay("update", "replay", "max_size=3", "--yes").returncode == 0
    assert replay("delete", "rollouts", str(keys[0]), "--yes").stdout == "1 deleted from rollouts\n"
    again = replay("delete", "rollouts", str(keys[0]), str(keys[1]), "--yes", "--json")
    assert again.returncode == 1
    assert json.loads(again.stdout) == {"deleted": 1, "missing": [str(keys[0])]}
    assert replay("reset", "replay", "--yes").stdout == "3 items removed from replay\n"
    assert json.loads(replay("reset", "--all", "--yes", "--json").stdout) == {"removed": 2}
    assert client.server_info().items == 0


def test_a_person_at_the_terminal_is_asked(client, server):
    client.insert(b"x", {"replay": 1.0})
    command = shlex.join([*COMMAND, "reset", "replay", "--address", server.address])
    for answer, status, left in (("n\n", 1, 1), ("y\n", 0, 0)):
        result = subprocess.run(
            ["script", "-qec", command, "/dev/null"], input=answer, capture_output=True, text=True, timeout=200
        )
        assert "Remove every item of replay?" in result.stdout
        assert (result.returncode, client.server_info().items) == (status, left)


def test_policy_is_shown_and_set(client, replay):
    assert replay("policy").stdout.startswith("version 0, no weights published")
    assert json.loads(replay("policy", "set", "7", "--weights", "runs/7", "--json").stdout)["version"] == 7
    assert (client.policy().version, client.policy().weights) == (7, "runs/7")
    assert replay("policy", "set", "6", "--rollback", "--yes").returncode == 0
    for command in (["policy"], ["policy", "show"]):
        shown = json.loads(replay(*command, "--json").stdout)
        assert (shown["version"], shown["weights"]) == (6, "")


def test_bench_measures_a_server_of_its_own_and_leaves_nothing_running():
    result = run_replay("bench", "--size", "1kB", "--seconds", "0.2", "--json")
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout)
    assert figures["bytes"] == 1000
    assert min(figures[name] for name in ("insert_per_second", "sample_per_second", "ack_p50_ms")) > 0
    assert figures["ack_p50_ms"] <= figures["ack_p99_ms"]


def test_each_figure_of_a_benchmark_is_of_a_step_at_least_however_little_time_there_is(client):
    client.update_table("replay", remover="fifo")
    assert min(measure(client, "replay", b"x", seconds=0.0).values()) > 0


def test_bench_of_a_running_server_asks_and_empties_its_table(client, replay):
    client.update_table("replay", remover="fifo")
    command = ["bench", "--size", "1kB", "--seconds", "0.1", "--table", "replay"]
    assert replay(*command).returncode == 2
    assert "a second" in replay(*command, "--yes").stdout
    assert client.server_info().items == 0

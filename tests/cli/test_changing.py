"""`table update`, `delete`, `reset`, `policy set`: they do what they say, and ask before a loss."""

import json
import shlex
import subprocess

import pytest

from tests.kit.processes import COMMAND, fails


def config_of(client, table):
    return json.loads(client.server_info().tables[table].config)


def test_update_changes_fields_and_says_from_what_to_what(client, replay):
    result = replay(
        *("table", "update", "replay", "max_size=32", "max_staleness=null", "max_bytes=2MiB", "sampler=uniform"),
        'rate_limiter={"type": "min_size", "min_size": 3}',
    )
    assert result.returncode == 0, result.stderr
    assert "replay.max_size: 16 -> 32\n" in result.stdout
    assert "replay.max_bytes: null -> 2097152\n" in result.stdout
    config = config_of(client, "replay")
    assert config["max_size"] == 32
    assert config["max_staleness"] is None
    assert config["sampler"]["type"] == "uniform"
    assert config["rate_limiter"]["min_size"] == 3
    assert "nothing changed" in replay("table", "update", "replay", "max_size=32").stdout


@pytest.mark.parametrize(
    ("command", "status", "words"),
    [
        ("tables --nonsense", 2, "there is no option --nonsense; see `replay tables --help`"),
        ("tables --addres 127.0.0.1:1", 2, "there is no option --addres; did you mean --address?"),
        ("srve", 2, "there is no command 'srve'; did you mean 'serve', 'score'?; see `replay --help`"),
        ("frobnicate", 2, "there is no command 'frobnicate'; see `replay --help`"),
        ("--address 127.0.0.1:0 serve", 2, "replay serve --listen HOST:PORT"),
        ("items", 2, "TABLE is needed; see `replay items --help`"),
        ("items nope", 1, "tables: rollouts, replay"),
        ("show 5", 1, "this server holds no item 5"),
        ("show five", 2, "'five' is not a key"),
        ("top", 2, "replay top --json"),
        ("table update replay max_sise=3", 2, "there is no 'max_sise'; did you mean 'max_size'?"),
        ("table update replay max_size", 2, "max_size"),
        ("table update replay max_size=-1", 1, "max_size must be at least 1, not -1"),
        ("table update replay max_bytes=0 --yes", 1, "max_bytes must be at least 1, not 0"),
        (
            "table update replay max_staleness=-3",
            1,
            "max_staleness must be at least 0, not -3",
        ),
        ("policy set 6 --yes", 1, "below the current 7"),
        ("table reset --yes", 2, "--all"),
        ("table reset replay --all --yes", 2, "--all"),
        *(
            (command, 2, "say --yes to do it")
            for command in (
                "table delete replay 1",
                "table reset replay",
                "table reset --all",
                "table update replay max_size=1",
                "table update replay max_bytes=2",
                "policy set 0 --rollback",
            )
        ),
        ("table export replay x.csv", 2, "must end with .jsonl or .parquet"),
        ("table export nope x.jsonl", 1, "no table 'nope'"),
        ("table import absent.jsonl", 1, "No such file"),
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
    assert client.server_info().tables["replay"].size == 4
    assert client.policy().version == 7
    assert list(tmp_path.iterdir()) == []


def test_what_loses_items_is_done_with_a_yes(client, replay):
    keys = [client.insert(b"x", {"replay": 1.0, "rollouts": 1.0}) for _ in range(4)]
    assert replay("table", "update", "replay", "max_size=3", "--yes").returncode == 0
    assert replay("table", "delete", "rollouts", str(keys[0]), "--yes").stdout == "1 deleted from rollouts\n"
    again = replay("table", "delete", "rollouts", str(keys[0]), str(keys[1]), "--yes", "--json")
    assert again.returncode == 1
    assert json.loads(again.stdout) == {"deleted": 1, "missing": [str(keys[0])]}
    assert replay("table", "reset", "replay", "--yes").stdout == "3 items removed from replay\n"
    assert json.loads(replay("table", "reset", "--all", "--yes", "--json").stdout) == {"removed": 2}
    assert client.server_info().items == 0


def test_a_person_at_the_terminal_is_asked(client, server):
    client.insert(b"x", {"replay": 1.0})
    command = shlex.join([*COMMAND, "--address", server.address, "table", "reset", "replay"])
    for answer, status, left in (("n\n", 1, 1), ("y\n", 0, 0)):
        result = subprocess.run(
            ["script", "-qec", command, "/dev/null"], input=answer, capture_output=True, text=True, timeout=200
        )
        assert "Remove every item of replay?" in result.stdout
        assert result.returncode == status
        assert client.server_info().items == left


def test_policy_is_shown_and_set(client, replay):
    assert replay("policy").stdout.startswith("version 0, no weights published")
    assert json.loads(replay("policy", "set", "7", "--weights", "runs/7", "--json").stdout)["version"] == 7
    assert client.policy().version == 7
    assert client.policy().weights == "runs/7"
    assert replay("policy", "set", "6", "--rollback", "--yes").returncode == 0
    shown = json.loads(replay("policy", "--json").stdout)
    assert shown["version"] == 6
    assert shown["weights"] == ""

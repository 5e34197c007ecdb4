"""`update`, `delete`, `reset`, `policy set`: they do what they say, and ask first where something would be lost."""

import json
import shlex
import subprocess

from tests.commands import COMMAND, run_replay


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


def test_update_names_what_is_wrong(replay):
    unknown = replay("update", "replay", "max_sise=3")
    assert unknown.returncode == 2
    assert "no field 'max_sise'; fields: name, sampler" in unknown.stderr
    assert replay("update", "replay", "max_size").returncode == 2
    refused = replay("update", "replay", "max_size=0")
    assert refused.returncode == 1
    assert "max_size" in refused.stderr


def test_update_refuses_a_value_that_no_table_takes_before_it_asks(client, replay):
    for _ in range(4):
        client.insert(b"x", {"replay": 1.0})
    for change, words in (
        ("max_size=-1", "max_size: Input should be greater than or equal to 1, not -1"),
        ("max_bytes=0", "max_bytes: Input should be greater than or equal to 1, not 0"),
        ("max_staleness=-3", "max_staleness: Input should be greater than or equal to 0, not -3"),
    ):
        refused = replay("update", "replay", change)
        assert (refused.returncode, refused.stderr) == (1, f"replay: table 'replay': {words}\n")


def test_what_loses_items_needs_a_yes(client, replay):
    keys = [client.insert(b"x", {"replay": 1.0, "rollouts": 1.0}) for _ in range(4)]
    for command in (
        ["delete", "replay", str(keys[0])],
        ["reset", "replay"],
        ["reset", "--all"],
        ["update", "replay", "max_size=1"],
        ["update", "replay", "max_bytes=2"],
        ["policy", "set", "0", "--rollback"],
    ):
        refused = replay(*command)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert "say --yes to do it" in refused.stderr
        assert refused.stderr.count("\n") == 1
    assert client.server_info().tables["replay"].size == 4
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
            ["script", "-qec", command, "/dev/null"], input=answer, capture_output=True, text=True, timeout=60
        )
        assert "Remove every item of replay?" in result.stdout
        assert (result.returncode, client.server_info().items) == (status, left)


def test_reset_wants_a_table_or_all_of_them(replay):
    assert replay("reset", "--yes").returncode == 2
    assert replay("reset", "replay", "--all", "--yes").returncode == 2


def test_policy_is_shown_and_set(client, replay):
    assert replay("policy").stdout.startswith("version 0, no weights published")
    assert json.loads(replay("policy", "set", "7", "--weights", "runs/7", "--json").stdout)["version"] == 7
    assert (client.policy().version, client.policy().weights) == (7, "runs/7")
    lower = replay("policy", "set", "6")
    assert lower.returncode == 1
    assert "below the current 7" in lower.stderr
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


def test_bench_of_a_running_server_asks_and_empties_its_table(client, replay):
    client.update_table("replay", remover="fifo")
    command = ["bench", "--size", "1kB", "--seconds", "0.1", "--table", "replay"]
    assert replay(*command).returncode == 2
    assert "a second" in replay(*command, "--yes").stdout
    assert client.server_info().items == 0

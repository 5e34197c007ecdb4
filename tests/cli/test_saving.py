"""`replay serve` with a data_dir and --restore, `replay checkpoint create` and `list`, as processes."""

import json
import shutil

import pytest

from replay_client import ReplayClient
from tests.kit.processes import fails, run_replay, server_process

CONFIG = """
[server]
data_dir = "{folder}/data"
[[tables]]
name = "plain"
"""


def config(folder):
    return CONFIG.format(folder=folder)


def test_checkpoints_are_made_listed_verified_and_restored_from(tmp_path):
    with server_process(tmp_path, config(tmp_path)) as server, ReplayClient(server.address) as client:
        key = client.insert(b"payload", {"plain": 1.0})
        made = run_replay("checkpoint", "create", "before", address=server.address)
        assert made.returncode == 0, made.stderr
        assert made.stdout == "before\n", made.stderr
        client.delete("plain", [key])
        listed = run_replay("checkpoint", "list", "--verify", address=server.address)
        assert listed.returncode == 0
        assert all(word in listed.stdout for word in ("before", "verified"))
        (entry,) = json.loads(run_replay("checkpoint", "list", "--json", address=server.address).stdout)
        assert entry["name"] == "before"
        assert entry["items"] == 1
        assert entry["bytes"] == 7
        assert entry["intact"]
        fails("checkpoint", "create", "../up", address=server.address)
        client.insert(b"other", {"plain": 1.0})
    path = tmp_path / "data" / "checkpoints" / "before.checkpoint"
    with server_process(tmp_path, config(tmp_path), options=["--restore", "latest", "--replace"]) as server:
        with ReplayClient(server.address) as client:
            assert [bytes(item.payload) for item in client.get([key])] == [b"payload"]
        path.write_bytes(path.read_bytes()[:-1])
        listed = run_replay("checkpoint", "list", address=server.address)
        assert listed.returncode == 1
        assert "not restorable: its end is missing" in listed.stdout


def test_a_second_checkpoint_of_a_name_is_made_only_if_the_person_says_so(tmp_path):
    with server_process(tmp_path, config(tmp_path)) as server, ReplayClient(server.address) as client:
        client.insert(b"payload", {"plain": 1.0})
        client.create_checkpoint("before")
        client.reset("plain")
        asked = fails("checkpoint", "create", "before", status=2, address=server.address)
        assert "There is a checkpoint 'before' already. Replace it? There is no terminal to ask on" in asked
        again = run_replay("checkpoint", "create", "before", "--yes", address=server.address)
        assert again.returncode == 0, again.stderr
        assert again.stdout == "before\n", again.stderr
        restored = run_replay("checkpoint", "list", "--json", address=server.address)
        assert [each["items"] for each in json.loads(restored.stdout)] == [0]


@pytest.mark.parametrize("command", ["create", "list"])
def test_without_a_server_they_say_so_soon_though_a_checkpoint_may_take_long(command):
    assert fails("checkpoint", command).startswith("replay: no replay server answers at 127.0.0.1:1 (tried for 5 s)")


def test_what_cannot_be_started_is_one_clear_line(tmp_path):
    with server_process(tmp_path, config(tmp_path)) as server, ReplayClient(server.address) as client:
        client.insert(b"x", {"plain": 1.0})
        made = run_replay("checkpoint", "create", "c", "--json", address=server.address)
        assert json.loads(made.stdout) == {"name": "c"}
        second = run_replay("serve", "--config", str(tmp_path / "replay.toml"), "--listen", "127.0.0.1:0")
        assert second.returncode == 1
        reason = f"data_dir {tmp_path}/data is in use by another server: stop that one, or name another folder"
        assert second.stderr.splitlines()[-1] == f"replay: {reason}"
    arguments = ("serve", "--config", str(tmp_path / "replay.toml"), "--listen", "127.0.0.1:0")
    assert "no checkpoint 'd'" in run_replay(*arguments, "--restore", "d").stderr
    assert "--replace to put them aside" in run_replay(*arguments, "--restore", "c").stderr
    assert run_replay(*arguments, "--replace").returncode == 2
    shutil.rmtree(tmp_path / "data" / "checkpoints")  # the start would fall back to the newest
    data = tmp_path / "data" / "data.mdb"
    data.write_bytes(data.read_bytes()[:20_000])
    cut = run_replay(*arguments)
    assert cut.returncode == 1
    assert "is damaged" in cut.stderr
    assert "--restore latest" in cut.stderr
    assert "Traceback" not in cut.stderr


def test_a_schedule_of_checkpoints_needs_a_folder_that_can_be_written(tmp_path):
    (tmp_path / "file").touch()
    path = tmp_path / "replay.toml"
    schedule = f'[checkpoints]\ndir = "{tmp_path}/file/in"\nevery_minutes = 60\n'
    path.write_text(f'[server]\nlisten = "127.0.0.1:0"\n{schedule}[[tables]]\nname = "plain"\n')
    said = fails("serve", "--config", str(path))
    assert said == f"replay: [checkpoints] dir {tmp_path}/file/in cannot be written: Not a directory\n"

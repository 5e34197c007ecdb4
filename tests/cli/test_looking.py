"""`tables`, `items`, `show`, `top --json`: what a person and a program see of a server."""

import contextlib
import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios

import ml_dtypes
import numpy as np
import pytest

from examples.demo.task import make_tokenizer
from replay_client import ReplayClient, group_from_rows
from replay_client.testing import make_group, until
from replay_generator.prompts.prompt import Prompt
from replay_generator.prompts.stored import PromptCursor, StoredPrompt
from replay_protos import replay_pb2 as pb
from tests.kit.clocks import in_a_thread
from tests.kit.golden import sections
from tests.kit.groups import make_sequences
from tests.kit.processes import COMMAND, Running, fails, server_process


def document(result):
    assert result.returncode == 0, result
    assert result.stderr == "", result
    return json.loads(result.stdout)


def test_tables_shows_sizes_and_who_waits_and_why(client, replay):
    client.insert(b"12345", {"replay": 1.0})
    waiting = in_a_thread(client.sample, "replay", 2, timeout=None)
    until(lambda: client.server_info().tables["replay"].sampling.count)
    shown = replay("tables")
    assert shown.returncode == 0
    assert "1 / 16" in shown.stdout
    assert "1 sample request waits, none was served for " in shown.stdout
    assert "replay: sampling blocked: 1 of 2 samples available (size 1)" in shown.stdout
    data = document(replay("tables", "--json"))
    table = data["tables"]["replay"]
    assert table["size"] == 1
    assert data["bytes"] == 5
    assert table["sampling"]["count"] == 1
    assert table["config"]["sampler"]["type"] == "prioritized"
    policy = {"version": 0, "weights": "", "age": data["policy"]["age"], "interval": None, "state": ""}
    assert data["policy"] == policy
    assert data["admission"] is None
    client.insert(b"x", {"replay": 1.0})
    assert len(waiting.result()) == 2


def test_tables_names_who_works_here_and_who_has_ended(client, server, replay):
    with ReplayClient(server.address, name="gen-a") as other, other.writer() as writer:
        writer.insert(b"x", {"replay": 1.0})
        writer.flush()
        assert re.search(r"^generator gen-a: connected, seen \d.* ago$", replay("tables").stdout, re.MULTILINE)
    until(lambda: not any(each.open for each in client.server_info().clients))
    assert "generator gen-a: not connected, seen " in replay("tables").stdout
    with ReplayClient(server.address, name="gen-a") as other:
        other.insert(b"x", {"replay": 1.0})
        other.leave()
    assert "generator gen-a: ended, seen " in replay("tables").stdout


@pytest.mark.parametrize("columns", [40, 60, 80, 120])
def test_a_narrow_terminal_shows_fewer_columns_and_each_of_them_whole(client, replay, columns):
    client.insert(b"12345", {"replay": 1.0})
    lines = on_a_terminal(columns, client.address).splitlines()
    table = [line for line in lines if line.startswith(("table", "rollouts", "replay"))]
    assert len(table) == 3
    assert "1 / 16" in table[2]
    assert "…" not in "".join(table)
    assert ("oldest" in table[0]) == (columns >= 80)


def on_a_terminal(columns, address):
    """What `replay tables` writes to a terminal of so many columns."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    command = [*COMMAND, "--address", address, "tables"]
    subprocess.run(command, stdout=slave, timeout=60, check=True, env=environment | {"TERM": "xterm", "NO_COLOR": "1"})
    os.close(slave)
    written = b""
    with contextlib.suppress(OSError):  # at the end, since nobody has the other side any more
        while some := os.read(master, 65536):
            written += some
    os.close(master)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.decode())


def test_what_json_says_has_the_same_fields_always(client, replay):
    client.insert(make_group(), {"replay": 1.0})
    data = document(replay("tables", "--json"))
    assert set(data) == {"address", *pb.ServerInfo.DESCRIPTOR.fields_by_name}
    assert set(data["tables"]["replay"]) == set(pb.TableInfo.DESCRIPTOR.fields_by_name)
    page = document(replay("items", "replay", "--json"))
    assert sorted(page) == ["items", "matching", "next_page", "table"]
    item_fields = (
        "age bytes columns effective_priority key missing_columns policy_version priority staleness tags times_sampled"
    )
    assert sorted(page["items"][0]) == item_fields.split()


def test_items_that_wait_for_a_column_say_so_everywhere(client, replay):
    client.update_table("rollouts", requires=["teacher_logprobs"])
    keys = [client.insert(make_group(), {"rollouts": 1.0}) for _ in range(3)]
    client.extend(keys[0], {"teacher_logprobs": np.zeros(6, np.float32)})
    assert "rollouts waits for teacher_logprobs: 2 items" in replay("tables").stdout
    shown = replay("items", "rollouts").stdout.splitlines()
    assert "missing columns" in shown[0]
    assert ["teacher_logprobs" in line for line in shown if line.startswith(tuple(map(str, keys)))] == [
        True,
        True,
        False,
    ]
    rows = document(replay("items", "rollouts", "--json", "--descending"))["items"]
    assert [row["missing_columns"] for row in rows] == [[], ["teacher_logprobs"], ["teacher_logprobs"]]
    assert rows[0]["columns"] == ["teacher_logprobs"]


def test_items_are_filtered_ordered_and_paged(client, replay):
    keys = [client.insert(b"x", {"replay": priority}, policy_version=1) for priority in (3.0, 1.0, 2.0)]
    client.insert(b"x", {"replay": 9.0}, policy_version=3)
    client.set_policy_version(3)
    first = document(
        replay("items", "replay", "--json", "--order-by", "priority", "--min-staleness", "1", "--limit", "2")
    )
    assert [row["priority"] for row in first["items"]] == [1.0, 2.0]
    assert [row["key"] for row in first["items"]] == [str(keys[1]), str(keys[2])]
    assert first["matching"] == 3
    assert first["items"][0]["staleness"] == 2
    rest = document(
        replay(
            *("items", "replay", "--json", "--order-by", "priority", "--min-staleness", "1", "--limit", "2"),
            *("--page", first["next_page"]),
        )
    )
    assert [row["priority"] for row in rest["items"]] == [3.0]
    assert rest["next_page"] is None
    highest = replay("items", "replay", "--order-by", "priority", "-d", "--limit", "1")
    assert "       9 " in highest.stdout
    assert "1 of 4 items; for the next ones add --page 1" in highest.stdout


def screen(result, key) -> str:
    """What `show` printed; KEY and AGE stand for what another run has otherwise."""
    assert result.returncode == 0, result.stderr
    return re.sub(r"inserted .* ago", "inserted AGE ago", result.stdout.replace(str(key), "KEY"))


def test_show_gives_text_rewards_and_log_probabilities_of_a_group(client, replay, tmp_path, golden):
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    ids = tokenizer("12+34=").input_ids
    group = make_group(prompt=ids, lengths=(2, 0, 1), rewards=(1.0, 0.0, 0.0), version=2, prompt_id="sum-7")
    group.rollout_logprobs[:] = [-0.5, -1.5, np.nan]
    key = client.insert(group, {"rollouts": 0.7, "replay": 0.5})
    screens = {
        "as text": screen(replay("show", hex(key), "--tokenizer", str(tmp_path)), key),
        "as tokens": screen(replay("show", str(key), "--tokens"), key),
    }
    golden("screens/show_group.txt", sections(screens))
    data = document(replay("show", str(key), "--tokens", "--json"))
    first, _, last = data["group"]["completions"]
    assert first["window"]["ids"] == group.completion_ids[:2].tolist()
    assert first["window"]["arrays"] == {"logprob": [-0.5, -1.5]}
    assert first["mean_logprob"] == -1.0
    assert last["window"]["arrays"] == {"logprob": [None]}
    assert last["mean_logprob"] is None
    assert last["unknown_logprobs"] == 1
    assert data["group"]["prompt"] == {"total": 6, "ids": ids, "text": "", "arrays": {}}


def test_show_prints_a_prompt_of_a_table_of_prompts_and_the_mark_behind_it(client, replay, golden):
    row = {"prompt": "12+34=", "prompt_id": "sum-7", "answer": "46"}
    key = client.insert(StoredPrompt(Prompt.of(row), 2, 5).encode(), {"replay": 1.0})
    cursor = client.insert(PromptCursor(1, 0, 9, "", 2, 6).encode(), {"replay": 1.0})
    screens = {
        "the prompt": screen(replay("show", str(key)), key),
        "the mark": screen(replay("show", str(cursor)), cursor),
    }
    golden("screens/show_prompt.txt", sections(screens))
    stored = document(replay("show", str(key), "--json"))["stored_prompt"]
    assert stored == {"prompt_id": "sum-7", "content": "12+34=", "row": row, "epoch": 2, "position": 5}
    assert document(replay("show", str(cursor), "--json"))["cursor"]["position"] == 6


def test_show_names_the_rollout_of_each_sequence_and_the_axis_of_each_extra(client, replay, golden):
    group = make_sequences(
        token_advantages=[0.5, 0, 0, 0, 2, 2],
        extras={"experts": np.zeros((8, 2), np.uint8), "image": np.zeros((1, 1), ml_dtypes.bfloat16)},
        axes={"experts": "whole"},
    )
    key = client.insert(group, {"replay": 1.0})
    golden("screens/show_sequences.txt", screen(replay("show", str(key)), key))


def test_show_tells_the_context_of_a_completion_from_what_the_policy_wrote(client, replay, tmp_path, golden):
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    group = group_from_rows(
        prompts=[tokenizer(text).input_ids for text in ("1+1=", "1+23=")],
        completions=[tokenizer("2").input_ids, tokenizer("24").input_ids],
        logprobs=[[-1.0], [-2.0, np.nan]],
        rewards=[1, 0],
        advantages=[1, -1],
    )
    key = client.insert(group, {"replay": 1.0})
    golden("screens/show_context.txt", screen(replay("show", str(key), "--tokenizer", str(tmp_path)), key))


def test_show_tells_who_wrote_each_turn_and_what_is_trained_on(client, replay, tmp_path, golden):
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    parts = [("assistant", "1+2"), ("tool", "=3"), ("assistant", "+"), ("assistant", "")]
    ids = [tokenizer(text).input_ids for _, text in parts]
    turns = [[["prompt", 4], *([role, len(each)] for (role, _), each in zip(parts, ids, strict=True))]]
    group = make_group(
        prompt=tokenizer("1+2=").input_ids,
        completions=[[token for each in ids for token in each]],
        loss_mask=[False, True, True, False, False, True],
        meta={"turns": turns, "worker": "a", "failures": ["RolloutError('exit code 3')", "OSError('gone')"]},
    )
    key = client.insert(group, {"replay": 1.0})
    golden("screens/show_turns.txt", screen(replay("show", str(key), "--tokenizer", str(tmp_path)), key))
    plain = client.insert(make_group(), {"replay": 1.0})
    assert "trained on" not in replay("show", str(plain)).stdout
    many = make_group(lengths=(80,), loss_mask=[token % 2 == 0 for token in range(80)])
    assert (
        "[and 16 more turns; --json has them all]\n" in replay("show", str(client.insert(many, {"replay": 1.0}))).stdout
    )


def test_show_of_other_bytes_says_so_and_sends_no_control_characters_to_the_terminal(client, replay, golden):
    key = client.insert(b"\x1b[31mred\x00" * 20, {"replay": 1.0})
    shown = replay("show", str(key))
    assert "\x1b" not in shown.stdout
    golden("screens/show_bytes.txt", screen(shown, key))
    data = document(replay("show", str(key), "--json"))
    assert data["group"] is None
    assert data["bytes"] == 180
    assert data["head"][0][:8] == "1b 5b 33"
    group_key = client.insert(make_group(prompt_id="\x1b]0;title\x07"), {"replay": 1.0})
    assert "\x1b" not in replay("show", str(group_key)).stdout


@contextlib.contextmanager
def looking(address, *options, **environment):
    """`replay top --json`, whose lines are documents."""
    command = [*options, "top", "--json", "--interval", "0.1"]
    environment = os.environ | {"REPLAY_ADDRESS": address} | environment
    with Running(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()  # or a test that fails would wait for it


def test_top_writes_a_line_for_each_look_and_goes_on_while_nobody_answers(server, client):
    with looking(server.address) as process:
        lines = map(json.loads, process.stdout)
        first = next(lines)
        assert set(first) == {"time", "address", *pb.ServerInfo.DESCRIPTOR.fields_by_name}
        client.insert(b"x", {"replay": 1.0})
        assert any(line["tables"]["replay"]["size"] == 1 for line in lines)
        server.stop()
        gone = next(line for line in lines if "problem" in line)
        assert set(gone) == {"time", "address", "problem"}
        assert gone["problem"].startswith("no replay server answers at ")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=200) == 130


@pytest.mark.long
def test_top_goes_on_while_a_server_hangs_and_ends_with_a_line_where_it_is_refused(tmp_path):
    tokens = tmp_path / "tokens"
    tokens.write_text("read-only:0123456789abcdef\n")
    config = f"[security]\ntokens_file = '{tokens}'\n[[tables]]\nname = 'a'\n"
    with (
        server_process(tmp_path, config) as server,
        looking(server.address, "--timeout", "2", REPLAY_TOKEN="0123456789abcdef") as process,
    ):

        def until_said(word):  # on a loaded machine it can miss the server for a moment, before that or after
            assert any(word in json.loads(line) for line in process.stdout)

        until_said("tables")
        server.process.send_signal(signal.SIGSTOP)
        until_said("problem")
        server.process.send_signal(signal.SIGCONT)
        until_said("tables")
        tokens.write_text("read-only:fedcba9876543210\n")
        _, said = process.communicate(timeout=200)
    assert process.returncode == 1
    assert said.startswith("replay: the token is not one of this server's")
    assert said.count("\n") == 1


def test_a_reader_that_has_seen_enough_ends_a_command_without_a_traceback(server):
    shell = f"{sys.executable} -m replay_cli top --json --interval 0.1 | head -1"
    environment = os.environ | {"REPLAY_ADDRESS": server.address}
    done = subprocess.run(shell, shell=True, capture_output=True, text=True, env=environment, timeout=200)
    assert json.loads(done.stdout)["address"] == server.address
    assert done.stderr == ""


@pytest.mark.parametrize(
    "command",
    ["tables", "items replay", "show 1", "policy", "table delete replay 1 -y", "table reset --all -y"],
)
def test_commands_fail_with_one_line_where_no_server_answers(command):
    assert fails("--timeout", "0.2", *command.split()).startswith("replay: no replay server answers at 127.0.0.1:1")


def test_without_a_command_there_is_the_help(replay):
    assert replay().stderr.startswith("Usage: replay ")


def test_output_has_colours_on_a_terminal_only_and_not_with_no_color(client, replay, server):
    client.insert(b"x", {"replay": 1.0})
    assert "\x1b[" not in replay("tables").stdout
    shell = f"{sys.executable} -m replay_cli --address {server.address} tables"
    on_terminal = ["script", "-qec", shell, "/dev/null"]
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | {"TERM": "xterm"}
    coloured = subprocess.run(on_terminal, capture_output=True, text=True, env=environment, stdin=subprocess.DEVNULL)
    plain = subprocess.run(
        on_terminal, capture_output=True, text=True, env=environment | {"NO_COLOR": "1"}, stdin=subprocess.DEVNULL
    )
    assert "\x1b[" in coloured.stdout
    assert not any(f"\x1b[{number}m" in plain.stdout for number in range(30, 38))


def test_the_shell_completes_commands_and_tables(replay):
    words = replay(_REPLAY_COMPLETE="complete_bash", COMP_WORDS="replay dash", COMP_CWORD="1").stdout.split()
    assert words == ["dashboard"]
    words = replay(_REPLAY_COMPLETE="complete_bash", COMP_WORDS="replay items re", COMP_CWORD="2").stdout.split()
    assert words == ["replay"]

"""A server that answers with what would take over a terminal, and what commands let through of it."""

import logging
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from replay_cli.process import TextFormatter
from replay_protos import replay_pb2 as pb
from replay_protos.replay_pb2_grpc import ReplayServicer, add_ReplayServicer_to_server
from replay_server import TableConfig
from tests.kit.processes import run_replay

EVIL = "\x1b]0;owned\x07\x9b2J\x9d0;owned\x9c\x7f\u202e\nok       memory: all is well"
"""A title, a cleared screen, both in their 8-bit forms too, a rubbed out character, writing from the right, and a line
that looks as if the command said it."""


class Hostile(ReplayServicer):
    def GetServerInfo(self, request, context):
        waiting = pb.Waiting(count=1, reason=EVIL, seconds=60)
        config = TableConfig(name="a", balance={"tag": "environment"}).model_dump_json()
        values = [pb.ValueInfo(name=EVIL, items=1, weight=1.0)]
        lacking = [pb.MissingColumn(name=EVIL, items=1)]
        table = pb.TableInfo(
            name=EVIL, config=config, sampling=waiting, values=values, incomplete_items=1, missing_columns=lacking
        )
        return pb.ServerInfo(version=EVIL, storage=EVIL, commit_error=EVIL, tables=[table], server_id=1)

    def GetPolicy(self, request, context):
        return pb.Policy(version=1, weights=EVIL)

    def ListCheckpoints(self, request, context):
        return pb.ListCheckpointsResponse(checkpoints=[pb.CheckpointInfo(name=EVIL, problem=EVIL)])

    def ListItems(self, request, context):
        if request.table == "tagged":
            tags = [pb.Tags(name="environment", texts=[EVIL])]
            one = {name: [1] for name in ("keys", "priorities", "ages", "policy_versions", "times_sampled")}
            one |= {"payload_sizes": [1], "effective_priorities": [1]}
            return pb.ListItemsResponse(matching=1, tags=tags, **one)
        context.abort(grpc.StatusCode.NOT_FOUND, "no table é" + EVIL)


@pytest.fixture(scope="module")
def address():
    server = grpc.server(ThreadPoolExecutor(2))
    add_ReplayServicer_to_server(Hostile(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None)


@pytest.mark.parametrize(
    "command",
    ["checkpoint list", "items a", "items tagged"]
    + [f"{each}{form}" for each in ("tables", "doctor", "policy") for form in ("", " --json")],
)
def test_no_command_sends_the_terminal_what_the_server_made_up(address, command):
    shown = run_replay(*command.split(), address=address)
    text = shown.stdout + shown.stderr
    assert "owned" in text  # the text is there, its commands are not
    assert "Traceback" not in text
    assert not {character for character in text if character != "\n" and not character.isprintable()} - {"\u202e"}
    assert "--json" in command or "\u202e" not in text
    assert "\nok       memory: all is well" not in text


@pytest.mark.parametrize(("logger", "lines"), [("replay_server", 1), ("vllm", 2)])
def test_a_record_of_our_own_log_is_one_line(logger, lines):
    record = logging.makeLogRecord({"name": logger, "msg": f"tag {EVIL}"})
    assert len(TextFormatter().format(record).split("\n")) == lines

"""Who is gone from a run over several servers, and who works there."""

from __future__ import annotations

from replay_client.records import server_info_of
from replay_client.shards.merging import merge_infos
from replay_protos import replay_pb2 as pb


def merged(**shards):
    return merge_infos({name: server_info_of(pb.ServerInfo(**fields)) for name, fields in shards.items()}, ())


def silence(side, age=90.0, table=""):
    return pb.Silence(side=side, table=table, age=age)


def client(name, age=1.0, **fields):
    return pb.ClientInfo(name=name, age=age, **{"role": "trainer", "open": 1} | fields)


def test_a_side_is_gone_only_if_no_shard_hears_of_it():
    info = merged(
        a={"silences": [silence("trainer", 90.0), silence("generators", 95.0, "rollouts")]},
        b={"silences": [silence("generators", 70.0, "rollouts"), silence("generators", 80.0, "eval")]},
    )
    assert [(each.side, each.table, each.age) for each in info.silences] == [("generators", "rollouts", 70.0)]


def test_a_client_of_several_shards_is_one_as_the_shard_knows_it_that_heard_of_it_last():
    info = merged(
        a={"clients": [client("x", 40.0, ended=True, open=0), client("y", 3.0)]},
        b={"clients": [client("x", 2.0, role="generator", open=2)]},
    )
    assert [(each.name, each.role, each.age, each.open, each.ended) for each in info.clients] == [
        ("x", "generator, trainer", 2.0, 2, False),
        ("y", "trainer", 3.0, 1, False),
    ]


def test_a_wait_is_long_where_it_is_long_for_the_slowest_shard():
    assert merged(a={"long_wait": 20.0}, b={"long_wait": 93.0}).long_wait == 93.0

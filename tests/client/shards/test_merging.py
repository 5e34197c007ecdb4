"""Several servers as one: what adds up, what counts as the least, who is gone from the run, and who works there."""

from __future__ import annotations

import json

import pytest

from replay_client.errors import InvalidRequestError, ServerUnavailableError
from replay_client.records import ItemInfo, ItemPage, server_info_of
from replay_client.shards.merging import merge_infos, merge_pages, read_page
from replay_protos import replay_pb2 as pb
from replay_server import TableConfig


def merged(**shards):
    return merge_infos({name: server_info_of(pb.ServerInfo(**fields)) for name, fields in shards.items()}, ())


def overdue(role, age=90.0, table=""):
    return pb.OverdueClient(role=role, table=table, age=age)


def client(name, age=1.0, **fields):
    return pb.ClientInfo(name=name, age=age, **{"role": "trainer", "open": 1} | fields)


def table(size=1, **fields):
    return pb.TableInfo(name="t", config=TableConfig(name="t", max_size=8).model_dump_json(), size=size, **fields)


@pytest.mark.parametrize(
    ("field", "first", "second", "together"),
    [
        pytest.param("items", 3, 4, 7, id="counts add up"),
        pytest.param("max_bytes", 10, 20, 30, id="bounds add up"),
        pytest.param("max_bytes", 10, 0, 0, id="a shard without a bound leaves all without one"),
        pytest.param("uptime", 50.0, 20.0, 20.0, id="the youngest start counts"),
        pytest.param("memory_available", 7, 5, 5, id="the shard with the least room counts"),
        pytest.param("memory_available", 0, 5, 5, id="a shard that does not know its room does not count"),
        pytest.param("version", "2.0", "1.0", "1.0, 2.0", id="different versions are both named"),
        pytest.param("version", "1.0", "1.0", "1.0", id="the same version is named once"),
        pytest.param("commit_error", "", "disk full", "b: disk full", id="an error is told with the shard's name"),
        pytest.param("long_wait", 20.0, 93.0, 93.0, id="a wait is long where it is long for the slowest shard"),
    ],
)
def test_a_number_of_several_shards(field, first, second, together):
    assert getattr(merged(a={field: first}, b={field: second}), field) == together


@pytest.mark.parametrize(
    ("of", "first", "second", "together"),
    [
        pytest.param(
            lambda t: t.evicted_on_arrival, {"evicted_on_arrival": 2}, {"evicted_on_arrival": 3}, 5, id="counters"
        ),
        pytest.param(lambda t: t.insert_blocked_share, {"insert_blocked_share": 0.5}, {}, 0.25, id="shares of time"),
        pytest.param(
            lambda t: (t.sampling.count, t.sampling.reason, t.sampling.seconds),
            {"sampling": pb.Waiting(count=1, reason="empty", seconds=9.0)},
            {"sampling": pb.Waiting(count=2, reason="too few", seconds=4.0)},
            (3, "empty", 9.0),
            id="waits: the longest gives the reason",
        ),
        pytest.param(
            lambda t: (t.age.min, t.age.p50, t.age.max, t.age.mean),
            {"size": 3, "age": pb.Quantiles(min=1, p50=2, max=3, mean=2)},
            {"size": 1, "age": pb.Quantiles(min=5, p50=6, max=7, mean=6)},
            (1, 3, 7, 3),
            id="quantiles: each shard counts by its items",
        ),
        pytest.param(
            lambda t: (t.age.min, t.age.p50),
            {"size": 0, "age": pb.Quantiles()},
            {"size": 1, "age": pb.Quantiles(min=5, p50=6)},
            (5, 6),
            id="quantiles: an empty shard does not count",
        ),
        pytest.param(
            lambda t: (t.sampled.age, t.sampled.interval),
            {"sampled": pb.ArrivalTimes(age=9, interval=2)},
            {"sampled": pb.ArrivalTimes(age=4, interval=3)},
            (4, 3),
            id="rhythms: the last time, and the slowest beat",
        ),
        pytest.param(
            lambda t: (t.limiter.samples_per_insert, t.limiter.difference),
            {"limiter": pb.Limiter(samples_per_insert=2, difference=5)},
            {"limiter": pb.Limiter(samples_per_insert=2, difference=-1)},
            (2, 4),
            id="limiters: settings stay, differences add up",
        ),
        pytest.param(lambda t: json.loads(t.config)["max_size"], {}, {}, 16, id="bounds in the configuration"),
    ],
)
def test_a_table_of_several_shards(of, first, second, together):
    info = merged(a={"tables": [table(**first)]}, b={"tables": [table(**second)]})
    assert of(info.tables["t"]) == together


def test_permits_of_several_shards_add_up_and_the_table_that_needs_them_stays():
    def admission(**fields):
        return {"admission": pb.AdmissionInfo(table="t", max_staleness=1, **fields)}

    found = merged(a=admission(capacity=2), b=admission(capacity=-3), c={}).admission
    assert found.table == "t"
    assert found.max_staleness == 1
    assert found.capacity == -1
    assert merged(a={}, b={}).admission is None


def test_a_side_is_gone_only_if_no_shard_hears_of_it():
    info = merged(
        a={"overdue": [overdue("trainer", 90.0), overdue("generator", 95.0, "rollouts")]},
        b={"overdue": [overdue("generator", 70.0, "rollouts"), overdue("generator", 80.0, "eval")]},
    )
    assert [(each.role, each.table, each.age) for each in info.overdue] == [("generator", "rollouts", 70.0)]


def test_a_client_of_several_shards_is_one_as_the_shard_knows_it_that_heard_of_it_last():
    info = merged(
        a={"clients": [client("x", 40.0, ended=True, open=0), client("y", 3.0)]},
        b={"clients": [client("x", 2.0, role="generator", open=2)]},
    )
    assert [(each.name, each.role, each.age, each.open, each.ended) for each in info.clients] == [
        ("x", "generator, trainer", 2.0, 2, False),
        ("y", "trainer", 3.0, 1, False),
    ]


# --------------------------------------------------------------------------------------------------------- pages


def page_of(*priorities: float, is_last: bool) -> ItemPage:
    """A page of one shard, with an item for each priority."""
    items = [
        ItemInfo(
            key=number,
            priority=priority,
            age=1.0,
            policy_version=0,
            staleness=0,
            times_sampled=0,
            nbytes=1,
            effective_priority=priority,
        )
        for number, priority in enumerate(priorities)
    ]
    return ItemPage(items, matching=len(items), next_page="" if is_last else "next")


def test_a_shard_that_is_away_for_one_page_keeps_its_place_in_the_listing():
    pages = {"b": page_of(3.0, 4.0, is_last=False)}
    merged_page = merge_pages(pages, {"a": "2", "b": "2"}, 2, "priority", descending=False)
    assert read_page(merged_page.next_page) == {"a": "2", "b": "4"}


def test_a_listing_goes_on_while_a_shard_is_away_and_the_others_are_at_their_end():
    pages = {"b": page_of(3.0, 4.0, is_last=True)}
    merged_page = merge_pages(pages, {"a": "2", "b": "2"}, 2, "priority", descending=False)
    assert read_page(merged_page.next_page) == {"a": "2", "b": "4"}


def test_a_listing_names_the_shard_whose_items_alone_are_left_and_which_is_away():
    pages = {"b": page_of(is_last=True)}
    with pytest.raises(ServerUnavailableError, match=r"^a went away while the items were listed"):
        merge_pages(pages, {"a": "2", "b": "4"}, 2, "priority", descending=False)


def test_a_merged_page_ends_where_a_page_that_the_server_has_cut_ends():
    pages = {"a": page_of(1.0, 2.0, is_last=False), "b": page_of(5.0, 6.0, is_last=True)}
    merged_page = merge_pages(pages, {}, 100, "priority", descending=False)
    assert [item.priority for item in merged_page] == [1.0, 2.0]
    assert read_page(merged_page.next_page) == {"a": "2", "b": "0"}


@pytest.mark.parametrize("page", ["x", "[]", '{"a": "x"}', '{"a": "-1"}', '{"a": 1.5}', "[" * 100_000])
def test_a_page_that_no_client_gave_out_is_refused(page):
    with pytest.raises(InvalidRequestError, match="not one that a client of several servers gave out"):
        read_page(page)

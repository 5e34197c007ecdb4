"""Prometheus: renders server info and latencies as metrics. Every name of a metric stands here and nowhere else.

A field of ServerInfo or TableInfo keeps its name, with the unit and `_total` that Prometheus asks for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import fields
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from replay_protos import replay_pb2 as pb
from replay_server.tables.meters import MANY, Counters
from replay_server.telemetry.latency import BOUNDS, Latencies

_STATISTICS = ("min", "p10", "p50", "p90", "max", "mean")
"""Values of the label `statistic`. Prometheus reserves the label `quantile` for summaries."""


class ServerCollector(Collector):
    """Asks for the server info at each scrape, and keeps nothing between two scrapes."""

    def __init__(self, ask: Callable[[], pb.ServerInfo], latencies: Latencies) -> None:
        self._ask = ask
        self._latencies = latencies

    def describe(self) -> list[Metric]:
        return []  # otherwise the registry would collect when this is registered

    def collect(self) -> Iterator[Metric]:
        info = self._ask()
        yield from server_metrics(info)
        yield from client_metrics(info)
        yield from table_metrics(info)
        yield from latency_metrics(self._latencies)


def server_metrics(info: pb.ServerInfo) -> Iterator[Metric]:
    about = {"version": info.version, "storage": info.storage, "server_id": str(info.server_id)}
    yield InfoMetricFamily("replay_server", "Version, storage, and an id that is new at each start.", about)
    on_disk = info.storage != "memory"
    if on_disk:
        yield CounterMetricFamily("replay_commits", "Commits to the disk since the start.", value=info.commits)
        yield CounterMetricFamily("replay_damaged", "Items lost because their bytes were damaged.", value=info.damaged)
    gauges: dict[str, tuple[str, float | None]] = {
        "replay_uptime_seconds": ("Since the start.", info.uptime),
        "replay_items": ("Payloads held.", info.items),
        "replay_bytes": ("Bytes of the payloads held.", info.bytes),
        "replay_max_bytes": ("Bound of replay_bytes, where there is one.", info.max_bytes or None),
        "replay_memory_available_bytes": ("Memory that the machine has left.", info.memory_available or None),
        "replay_disk_available_bytes": ("Space that the disk of data_dir has left.", info.disk_available or None),
        "replay_fell_back": (
            "1: the start found damage on the disk, and went back to an older state.",
            float(bool(info.fell_back)) if on_disk else None,
        ),
        "replay_commit_failing": (
            "1: the server cannot write to data_dir, and refuses inserts.",
            float(bool(info.commit_error)) if on_disk else None,
        ),
        "replay_insert_streams": ("Open streams of inserts.", info.insert_streams),
        "replay_sample_streams": ("Open streams of samples.", info.sample_streams),
        "replay_policy_version": ("Finished updates of the trainer.", info.policy.version),
        "replay_policy_age_seconds": ("Since the policy version was set.", info.policy.age),
        "replay_policy_usual_seconds": ("Usually between two versions, where it is known.", info.policy.usual or None),
        "replay_long_wait_seconds": ("From which on a wait is long: three usual steps.", info.long_wait),
    }
    if info.HasField("admission"):
        admission = info.admission
        gauges |= {
            "replay_permits_accepted": (
                "Groups counted as generated: inserted with a permit, or used before this server heard of the run.",
                admission.accepted,
            ),
            "replay_permits_running": ("Permits granted and not used up.", admission.running),
            "replay_permits_capacity": ("Permits that could be granted now.", admission.capacity),
            "replay_permits_waiting": ("Requests that wait for permits.", admission.acquiring.count),
            "replay_permits_waiting_seconds": (
                "Since when requests wait and no permit was granted.",
                admission.acquiring.seconds,
            ),
        }
        yield CounterMetricFamily(
            "replay_permits_expired", "Permits that expired unused.", value=float(admission.expired)
        )
    for name, (text, value) in gauges.items():
        if value is not None:
            yield GaugeMetricFamily(name, text, value=value)


def client_metrics(info: pb.ServerInfo) -> Iterator[Metric]:
    silent = GaugeMetricFamily(
        "replay_silent_seconds",
        "Since when a side of the run is gone: three usual intervals without a sign, and it did not say that it ends. "
        "0: it is there, or unknown.",
        labels=["side"],
    )
    for side in ("trainer", "generators"):
        silent.add_metric([side], max((each.age for each in info.silences if each.side == side), default=0.0))
    yield silent
    there = GaugeMetricFamily("replay_clients", "Named clients that have a call or stream open.", labels=["role"])
    for role in ("trainer", "generator"):
        there.add_metric([role], sum(role in each.role and each.open > 0 for each in info.clients))
    yield there


def table_metrics(info: pb.ServerInfo) -> Iterator[Metric]:
    gauges: dict[str, tuple[str, Callable[[pb.TableInfo], float | None]]] = {
        "replay_table_items": ("Items in the table.", lambda table: table.size),
        "replay_table_max_items": ("The most items that it holds.", lambda table: json.loads(table.config)["max_size"]),
        "replay_table_bytes": ("Bytes of their payloads.", lambda table: table.bytes),
        "replay_table_max_bytes": (
            "Bound of replay_table_bytes, where there is one.",
            lambda table: json.loads(table.config)["max_bytes"],
        ),
        "replay_table_reserved_items": ("Drawn for a prefetch or lease and not yet taken.", lambda t: t.reserved),
    }
    for name, (text, value_of) in gauges.items():
        gauge = GaugeMetricFamily(name, text, labels=["table"])
        for table in info.tables:
            if (value := value_of(table)) is not None:
                gauge.add_metric([table.name], value)
        yield gauge
    for declared in fields(Counters):
        name, text = declared.name, f"{declared.metadata['help']} Since the start or reset."
        counter = CounterMetricFamily(f"replay_table_{name}", text, labels=["table"])
        for table in info.tables:
            counter.add_metric([table.name], getattr(table, name))
        yield counter
    yield from _waits(info)
    estimated = f"Above {MANY} items p10, p50 and p90 are estimated from {MANY} items drawn at random."
    for field, unit, text in (
        ("staleness", "_versions", "How far the items lag behind the policy version."),
        ("age", "_seconds", "Since the items were inserted."),
        ("priority", "", "Priorities of the items."),
    ):
        gauge = GaugeMetricFamily(f"replay_table_{field}{unit}", f"{text} {estimated}", labels=["table", "statistic"])
        for table in info.tables:
            if table.size:
                for statistic in _STATISTICS:
                    gauge.add_metric([table.name, statistic], getattr(getattr(table, field), statistic))
        yield gauge


def _waits(info: pb.ServerInfo) -> Iterator[Metric]:
    labels = ["table", "operation"]
    waiting = GaugeMetricFamily("replay_table_waiting", "Requests that wait.", labels=labels)
    seconds = GaugeMetricFamily(
        "replay_table_waiting_seconds", "Since when requests wait and none was served.", labels=labels
    )
    share = GaugeMetricFamily(
        "replay_table_blocked_ratio", "Share of the last minute in which one waited.", labels=labels
    )
    for table in info.tables:
        for operation, wait, blocked in (
            ("insert", table.inserting, table.insert_blocked_share),
            ("sample", table.sampling, table.sample_blocked_share),
        ):
            waiting.add_metric([table.name, operation], wait.count)
            seconds.add_metric([table.name, operation], wait.seconds)
            share.add_metric([table.name, operation], blocked)
    yield from (waiting, seconds, share)


def latency_metrics(latencies: Latencies) -> Iterator[Metric]:
    histogram = HistogramMetricFamily(
        "replay_grpc_handling_seconds",
        "From a request to its answer, waiting included; in streams from each message to the next one back.",
        labels=["method"],
    )
    for method, measured in list(latencies.histograms.items()):
        totals = list(accumulate(list(measured.counts)))
        bounds = [*(repr(bound) for bound in BOUNDS), "+Inf"]
        histogram.add_metric([method], list(zip(bounds, totals, strict=True)), measured.sum)
    yield histogram
    ended = CounterMetricFamily("replay_grpc_handled", "Calls that ended, by status code.", labels=["method", "code"])
    for (method, code), count in sorted(latencies.ended.copy().items()):
        ended.add_metric([method, code], count)
    yield ended

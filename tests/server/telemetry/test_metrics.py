"""What Prometheus, load balancers and log collectors get from a real server."""

import asyncio
import json
import re
import signal
import socket
import subprocess
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub

from replay_client import ReplayClient
from replay_client.testing import PATIENCE, make_group, until
from replay_protos import replay_pb2 as pb
from replay_protos.replay_pb2_grpc import ReplayStub
from replay_server import AdmissionConfig, ReplayServer, SecurityConfig, TableConfig
from tests.certificates import make_certificate
from tests.kit.clocks import in_a_thread
from tests.kit.processes import fails, free_port, sample_of, scrape, server_process, tokens_file

ROOT = Path(__file__).parents[3]


def value(samples, name, **labels):
    return samples[sample_of(name, **labels)]


@pytest.fixture
def server():
    tables = [
        TableConfig(name="rollouts", rate_limiter={"type": "queue", "max_size": 2}, forward_to="replay"),
        TableConfig(name="replay", max_staleness=2, max_bytes="1MB"),
    ]
    admission = AdmissionConfig(fresh_groups_per_step=4, max_staleness=1)
    with ReplayServer(
        tables=tables, port=0, admission=admission, max_bytes="1GB", metrics_listen="127.0.0.1:0"
    ) as server:
        yield server


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text; version=1.0.0"])
def test_a_scrape_says_what_server_info_says(server, client, accept):
    for version in (0, 1):
        client.insert(make_group(version=version), {"rollouts": 1.0 + version})
    client.sample("rollouts")
    client.set_policy_version(3)
    info, samples = client.server_info(), scrape(server.metrics_address, accept)
    for name, table in info.tables.items():
        for counter in ("inserts", "samples", "consumed", "stale", "forwarded", "evicted_unsampled", "duplicates"):
            assert value(samples, f"replay_table_{counter}_total", table=name) == getattr(table, counter)
    assert value(samples, "replay_table_stale_total", table="replay") == 1
    assert ("replay_table_max_bytes", ("table", "rollouts")) not in samples
    assert value(samples, "replay_table_staleness_versions", table="rollouts", statistic="p50") == 2
    assert value(samples, "replay_table_priority", table="rollouts", statistic="max") == 2
    assert value(samples, "replay_items") == info.items
    assert value(samples, "replay_bytes") == info.bytes
    assert value(samples, "replay_policy_version") == 3
    assert value(samples, "replay_permits_capacity") == 8
    assert value(samples, "process_resident_memory_bytes") > 1e6
    assert any(key[0] == "replay_server_info" for key in samples)


def test_a_wait_is_seen_with_its_table_and_operation(server, client):
    for _ in range(2):
        client.insert(b"x", {"rollouts": 1.0})
    with ThreadPoolExecutor() as pool:
        pool.submit(client.insert, b"x", {"rollouts": 1.0})
        until(lambda: client.server_info().tables["rollouts"].inserting.count)
        samples = scrape(server.metrics_address)
        assert value(samples, "replay_table_waiting", table="rollouts", operation="insert") == 1
        assert value(samples, "replay_table_waiting_seconds", table="rollouts", operation="insert") > 0
        assert value(samples, "replay_table_waiting", table="rollouts", operation="sample") == 0
        client.sample("rollouts")


def test_calls_are_timed_and_counted_by_method_and_status(server, client):
    def count(samples, method):
        return value(samples, "replay_grpc_handling_seconds_count", method=method)

    before = scrape(server.metrics_address)
    for _ in range(3):
        client.insert(b"x", {"replay": 1.0})
    with grpc.insecure_channel(server.address) as channel:
        sample = ReplayStub(channel).Sample
        list(sample(pb.SampleRequest(table="replay", num_samples=1)))
        for refused in (
            pb.SampleRequest(table="replay", num_samples=50, timeout=0.3),
            pb.SampleRequest(table="nope", num_samples=1),
        ):
            with pytest.raises(grpc.RpcError):
                list(sample(refused))
    client.sample("replay")

    def all_counted():  # a call is counted when the server has ended it, a moment after its answer
        samples = scrape(server.metrics_address)
        more = {method: count(samples, method) - count(before, method) for method in ("Sample", "InsertStream", "Draw")}
        codes = ("OK", "DEADLINE_EXCEEDED", "NOT_FOUND")
        ended = [samples.get(sample_of("replay_grpc_handled_total", method="Sample", code=code)) for code in codes]
        well = ended == [1, 1, 1] and more["Sample"] == more["InsertStream"] == 3 and more["Draw"]
        return samples if well else None

    after = until(all_counted)
    fast, all_calls = (
        value(after, "replay_grpc_handling_seconds_bucket", method="Sample", le=le) for le in ("0.25", "+Inf")
    )
    assert fast <= 2  # the one that waited for 0.3 s is not among them
    assert all_calls == 3
    assert value(after, "replay_grpc_handling_seconds_sum", method="Sample") >= 0.3


def test_calls_that_are_broken_off_are_counted_and_give_back_what_they_held(server, client):
    client.insert(b"x", {"replay": 1.0})
    with client.sampler("replay", 1, prefetch=3) as sampler:
        next(sampler)
    until(lambda: not client.server_info().sample_streams)

    def ended():
        samples = scrape(server.metrics_address)
        return [key for key in samples if key[0] == "replay_grpc_handled_total" and ("method", "Draw") in key]

    until(ended)
    assert client.server_info().tables["replay"].reserved == 0


def test_scrapes_do_not_get_in_each_others_way_nor_in_that_of_clients(server, client):
    with ThreadPoolExecutor(4) as pool:
        scrapes = [pool.submit(scrape, server.metrics_address) for _ in range(20)]
        for _ in range(50):
            client.insert(b"x", {"replay": 1.0})
        assert all(each.result() for each in scrapes)
    assert value(scrape(server.metrics_address), "replay_table_inserts_total", table="replay") == 50


def test_other_paths_are_not_found_and_name_the_right_one(server):
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(f"http://{server.metrics_address}/", timeout=60)
    assert caught.value.code == 404
    said = caught.value.read()
    assert b"/metrics" in said
    assert b"/health" in said
    caught.value.close()


@pytest.mark.parametrize("what", ["metrics", "grpc"])
def test_a_port_in_use_is_an_error_and_leaves_nothing_listening(what):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        in_use, free = taken.getsockname()[1], free_port()
        ports = {"port": free, "metrics_listen": f"127.0.0.1:{in_use}"}
        if what == "grpc":
            ports = {"port": in_use, "metrics_listen": f"127.0.0.1:{free}"}
        server = ReplayServer(tables=[TableConfig(name="a")], **ports)
        with pytest.raises(OSError, match=f"{in_use}: it is in use"):
            server.start()
        socket.create_server(("127.0.0.1", free)).close()


def test_without_an_address_there_are_no_metrics_and_a_bad_one_is_refused(tmp_path):
    with ReplayServer(tables=[TableConfig(name="a")], port=0) as server:
        assert server.metrics_address is None
    path = tmp_path / "replay.toml"
    path.write_text("[server]\nmetrics_listen = '7401'\n[[tables]]\nname = 'a'\n")
    for arguments in (["--config", str(path)], ["--metrics-listen", "here:99999"], ["--listen", "127.0.0.1:99999"]):
        assert "listen must be host:port, for example 127.0.0.1:7401" in fails("serve", *arguments, status=2)


def test_every_metric_of_the_dashboard_is_in_a_scrape(server, client):
    client.insert(b"x", {"replay": 1.0})
    client.policy()
    names = {key[0] for key in scrape(server.metrics_address)}
    dashboard = json.loads((ROOT / "docker/chart/dashboard.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    queries += [entry["query"]["query"] for entry in dashboard["templating"]["list"] if entry["type"] == "query"]
    used = {name for query in queries for name in re.findall(r"\b(?:replay|process)_[a-z_]+", query)}
    assert len(used) > 20
    assert used <= names, used - names
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in dashboard["panels"])
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


# ------------------------------------------------------------------------------------------- health, reflection, logs


def test_reflection_needs_any_token(tmp_path):
    security = SecurityConfig(tokens_file=tokens_file(tmp_path, "read-only:0123456789abcdef0123"))
    with (
        ReplayServer(tables=[TableConfig(name="a")], port=0, security=security) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        ask = iter([ServerReflectionRequest(list_services="")])
        with pytest.raises(grpc.RpcError):
            list(ServerReflectionStub(channel).ServerReflectionInfo(ask))
        metadata = (("authorization", "Bearer 0123456789abcdef0123"),)
        ask = iter([ServerReflectionRequest(list_services="")])
        answer = next(ServerReflectionStub(channel).ServerReflectionInfo(ask, metadata=metadata))
        services = {service.name for service in answer.list_services_response.service}
        assert "replay.v1.Replay" in services
        ask = iter([ServerReflectionRequest(file_containing_symbol="replay.v1.Replay")])
        answer = next(ServerReflectionStub(channel).ServerReflectionInfo(ask, metadata=metadata))
        assert b"GetServerInfo" in answer.file_descriptor_response.file_descriptor_proto[0]


@pytest.mark.parametrize("secured", [False, True], ids=["open", "with tokens and TLS"])
def test_the_health_over_http_is_ok_for_anyone_and_says_nothing_else(tmp_path, secured):
    security = SecurityConfig()
    if secured:
        path = tokens_file(tmp_path, "read-only:0123456789abcdef0123")
        own = make_certificate(tmp_path, "server", make_certificate(tmp_path, "ca"))
        security = SecurityConfig(tokens_file=path, tls_cert=own.cert, tls_key=own.key)
    with (
        ReplayServer([TableConfig(name="a")], port=0, metrics_listen="127.0.0.1:0", security=security) as server,
        urllib.request.urlopen(f"http://{server.metrics_address}/health", timeout=60) as response,
    ):
        assert response.status == 200
        assert response.read() == b"ok"


def test_the_process_logs_json_and_says_where_its_metrics_are(tmp_path):
    options = ("--metrics-listen", "127.0.0.1:0", "--log-format", "json", "--log-level", "info")
    with server_process(tmp_path, options=options, stderr=subprocess.PIPE) as server:
        where = server.process.stdout.readline().removeprefix("metrics at http://").strip().removesuffix("/metrics")
        with ReplayClient(server.address) as client:
            client.insert(b"x", {"replay": 1.0})
        assert value(scrape(where), "replay_table_inserts_total", table="replay") == 1
        server.process.send_signal(signal.SIGTERM)
        errors = server.process.stderr.read()
        assert server.process.wait(200) == 0
    lines = [json.loads(line) for line in errors.splitlines()]
    assert all(sorted(line) == ["level", "logger", "message", "time"] for line in lines)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", lines[0]["time"])
    assert any(line["message"] == "serving the tables rollouts, replay" for line in lines)
    assert lines[-1]["message"] == "stopped"


@pytest.mark.parametrize("path", ["metrics", "health"])
def test_a_question_to_a_busy_server_fails_soon_instead_of_hanging(server, monkeypatch, path):
    monkeypatch.setattr("replay_server.telemetry.prometheus._LOOP_SECONDS", 0.2)
    blocked, busy = threading.Event(), threading.Event()

    def block(buffer):
        blocked.set()
        return busy.wait(PATIENCE)

    blocking = in_a_thread(server.on_loop, block)
    try:
        assert blocked.wait(PATIENCE)
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(f"http://{server.metrics_address}/{path}", timeout=60)
    finally:
        busy.set()
    assert blocking.result()
    assert caught.value.code == 503
    caught.value.close()


async def test_the_endpoint_is_closed_with_the_server():
    address = f"127.0.0.1:{free_port()}"
    server = ReplayServer([TableConfig(name="a")], port=0, metrics_listen=address)
    await asyncio.to_thread(server.start)
    assert await asyncio.to_thread(scrape, address)
    await asyncio.to_thread(server.stop)
    with pytest.raises(OSError, match="refused"):
        await asyncio.to_thread(scrape, address)

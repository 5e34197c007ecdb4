"""Weights without a shared disk: what a generator makes of versions and deltas that it fetches over HTTP."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from replay_client.access import ListenAddress
from replay_client.testing import async_until
from replay_generator import GeneratorConfig, WeightsNotAllowedError, WeightsNotFoundError
from replay_generator.metrics import GeneratorMetrics
from replay_generator.policy.remote import WeightsServer, checksum_of
from replay_generator.policy.remote.fetching import Fetcher, WeightsAwayError
from replay_generator.testing import ScriptedEngine
from replay_trainer.weights import WithDelta, publish_weights, published, remove
from tests.certificates import make_certificate
from tests.kit.clients import RecordingClient
from tests.kit.generators import make_generator, running
from tests.kit.models import save_model
from tests.kit.processes import Running, fails, free_port

KEPT = 3


class Run:
    """A trainer as far as its weights go: publishes versions of a model, and serves them over HTTP."""

    def __init__(self, base: Path, folder: Path, port: int, scheme: str = "http") -> None:
        self.folder, self.base = folder, base
        self.url = f"{scheme}://127.0.0.1:{port}"
        self.model: Any = AutoModelForCausalLM.from_pretrained(base)

    def publish(self, version: int, *, size: float = 1e-4) -> str:
        """Publishes a version that differs from the last one by about `size`. Returns where it is announced."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn_like(parameter) * size)
        writer = WithDelta(self.model, self.folder, "bfloat16")
        probe = {"token_ids": [3, 9], "logprobs": [-0.5]}
        state = self.model.state_dict()
        publish_weights(writer, None, self.folder, version=version, keep=KEPT, probe=probe, weights=state)
        return f"{self.url}/step-{version}"

    def files_of(self, version: int) -> dict[str, bytes]:
        """All that an engine reads, and the manifest."""
        return {path.name: path.read_bytes() for path in (self.folder / f"step-{version}").iterdir() if path.is_file()}

    @property
    def whole(self) -> int:
        """Bytes of the weights of a version."""
        return (published(self.folder)[-1] / "model.safetensors").stat().st_size


class Disk:
    """The machine of a generator."""

    def __init__(self, cache: Path, **config: Any) -> None:
        self.cache = cache
        self.metrics = GeneratorMetrics(solved_reward=1.0)
        self.config = config
        self.fetcher: Fetcher | None = None

    def fetch(self, location: str) -> tuple[dict[str, bytes], int]:
        """The files of the folder that it gets, and how many bytes came over the network."""
        before = self.metrics.stats["fetched_bytes"]
        if self.fetcher is None:
            given = {"weights_root": location.rpartition("/")[0], "weights_cache": self.cache, **self.config}
            self.fetcher = Fetcher(GeneratorConfig(**given), self.metrics.stats)
        folder = Path(self.fetcher.folder_of(location))
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        return files, self.metrics.stats["fetched_bytes"] - before


@contextmanager
def serving(folder: Path, port: int, **files: Path) -> Iterator[None]:
    with WeightsServer(folder, ListenAddress("weights", f"127.0.0.1:{port}", **files)) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield
        server.shutdown()


@pytest.fixture
def run(model: Path, tmp_path: Path) -> Iterator[Run]:
    port = free_port()
    with serving(tmp_path / "weights", port):
        yield Run(model, tmp_path / "weights", port)


def test_deltas_give_each_bit_of_the_version_and_are_small(run, tmp_path):
    disk = Disk(tmp_path / "cache")
    files, came = disk.fetch(run.publish(1))
    assert files == run.files_of(1)
    assert came > run.whole
    for version in (2, 3, 4, 5):
        files, came = disk.fetch(run.publish(version))
        assert files == run.files_of(version)
        assert came < run.whole / 2
    assert len(list((tmp_path / "cache/replay-weights/0").iterdir())) == 2  # the engine's and the newest
    tensors = load_file(run.folder / "step-5/model.safetensors")
    assert {each.dtype for each in tensors.values()} == {torch.bfloat16}


def test_no_proxy_is_asked_for_weights_on_this_machine_and_elsewhere_its_variable_is_named(run, tmp_path, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    disk = Disk(tmp_path / "cache")
    files, _ = disk.fetch(run.publish(1))
    assert files == run.files_of(1)
    says = "the variable http_proxy sends it through a proxy: no_proxy=trainer.example.com goes there directly"
    with pytest.raises(WeightsAwayError, match=says):
        Disk(tmp_path / "other").fetch("http://trainer.example.com:7410/step-1")


def test_versions_that_were_skipped_need_no_whole_one_nor_does_a_generator_that_starts_again(run, tmp_path, caplog):
    Disk(tmp_path / "cache").fetch(run.publish(1))
    run.publish(2)
    files, came = Disk(tmp_path / "cache").fetch(run.publish(3))
    assert files == run.files_of(3)
    assert came < run.whole
    own = tmp_path / "cache/replay-weights/0"
    shutil.copytree(own / "step-3", own / "part")  # a kill's rest
    files, came = Disk(tmp_path / "cache").fetch(run.publish(4))
    assert files == run.files_of(4)
    assert came < run.whole / 2
    assert caplog.messages == []


def trouble(run: Run, how: str, version: int) -> str:
    """Publishes a version of which no delta leads from the one before, as a generator has it."""
    if how == "rollback":
        for folder in published(run.folder):
            remove(folder)
        run.model = AutoModelForCausalLM.from_pretrained(run.base)
    if how == "late":
        for skipped in range(version * 10, version * 10 + KEPT + 1):
            run.publish(skipped)
        return run.publish(version * 10 + KEPT + 1)
    location = run.publish(version)
    folder = run.folder / f"step-{version}"
    delta = folder / "delta/model.safetensors"
    if how == "damaged":
        data = bytearray(delta.read_bytes())
        data[len(data) // 2] ^= 1
        delta.write_bytes(data)
    elif how == "cut off":
        delta.write_bytes(delta.read_bytes()[:-7])
    elif how == "of another base":
        with (run.folder / f"step-{version}/delta/base.json").open("r+") as file:
            other = {**json.load(file), "checksums": json.loads((folder / "manifest.json").read_text())["checksums"]}
            other["checksums"]["model.safetensors"] = "0"
            file.seek(0)
            json.dump(other, file)
    elif how == "in a circle":
        base = {"version": f"step-{version}", "checksums": {"model.safetensors": "0"}}
        (run.folder / f"step-{version}/delta/base.json").write_text(json.dumps(base))
    elif how == "lost":
        delta.unlink()
    elif how == "lost folder":
        shutil.rmtree(folder / "delta")
    return location


@pytest.mark.parametrize(
    "how", ["damaged", "cut off", "of another base", "in a circle", "lost", "lost folder", "rollback", "late"]
)
def test_where_no_delta_leads_to_a_version_the_whole_is_fetched_and_that_is_said_once(run, tmp_path, caplog, how):
    disk = Disk(tmp_path / "cache")
    disk.fetch(run.publish(1))
    for version in (2, 3):
        location = trouble(run, how, version)
        files, came = disk.fetch(location)
        assert files == run.files_of(int(location.rpartition("-")[2]))
        assert came > run.whole
    assert len(caplog.messages) == 1
    assert "is fetched whole, because no delta makes it of what is here" in caplog.text
    files, came = disk.fetch(run.publish(99))  # and then deltas again
    assert files == run.files_of(99)
    assert came < run.whole


def test_another_model_has_no_delta(run, tmp_path, caplog):
    disk = Disk(tmp_path / "cache")
    disk.fetch(run.publish(1))
    run.model = AutoModelForCausalLM.from_pretrained(save_model(tmp_path / "other", tied=True))
    files, _ = disk.fetch(run.publish(2))
    assert files == run.files_of(2)
    assert "step-2/delta/base.json is not there (said once)" in caplog.text


@pytest.mark.parametrize(
    "path",
    [
        *("/", "/step-1", "/step-1/", "/step-1/delta", "/step-1/delta/", "/step-1/private", "/step-2/manifest.json"),
        *("/../secret", "/step-1/../../secret", "/step-1/%2e%2e/%2e%2e/secret", "//step-1/../../secret", "/secret"),
        *("/step-1/link", "/other/manifest.json", "/step-1/manifest.json/../../../secret", "//etc/passwd"),
    ],
)
def test_only_the_files_of_published_versions_can_be_had(run, tmp_path, path):
    run.publish(1)
    (tmp_path / "secret").write_text("secret")
    (run.folder / "secret").write_text("secret")
    (run.folder / "step-1/private").write_text("secret")
    (run.folder / "step-1/link").symlink_to(tmp_path / "secret")
    (run.folder / "other").mkdir()
    (run.folder / "other/manifest.json").write_text('{"files": {}}')
    (run.folder / "step-2").mkdir()
    connection = http.client.HTTPConnection(run.url.removeprefix("http://"), timeout=60)
    for method, given in [("GET", path), ("POST", "/step-1/manifest.json"), ("PUT", "/step-1/manifest.json")]:
        connection.request(method, given)
        answer = connection.getresponse()
        assert answer.status == (404 if method == "GET" else 501)
        assert b"secret" not in answer.read().replace(b"/secret", b"")
        connection.close()


def test_a_token_and_tls_are_asked_for_and_a_token_file_may_change(model, tmp_path):
    authority = make_certificate(tmp_path, "authority")
    own, port = make_certificate(tmp_path, "server", authority), free_port()
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    theirs.write_text("the-token-of-the-run\n")
    with serving(tmp_path / "weights", port, token_file=theirs, cert=own.cert, key=own.key):
        run = Run(model, tmp_path / "weights", port, "https")
        location = run.publish(1)
        with pytest.raises(WeightsAwayError, match="certificate verify failed"):
            Disk(tmp_path / "cache").fetch(location)
        with pytest.raises(WeightsNotAllowedError, match="weights_token_file is that of its server"):
            Disk(tmp_path / "cache", weights_tls_ca=authority.cert).fetch(location)
        ours.write_text("another-token")
        disk = Disk(tmp_path / "cache", weights_tls_ca=authority.cert, weights_token_file=ours)
        with pytest.raises(WeightsNotAllowedError):
            disk.fetch(location)
        ours.write_text("the-token-of-the-run")
        assert disk.fetch(location)[0] == run.files_of(1)
        for path in (theirs, ours):
            (tmp_path / "new").write_text("the-next-token")
            (tmp_path / "new").rename(path)
        assert disk.fetch(run.publish(2))[0] == run.files_of(2)


@pytest.mark.parametrize(
    ("address", "files", "says"),
    [
        ("0.0.0.0:7410", {}, "weights 0.0.0.0:7410: other machines reach it, so it needs a token_file"),
        ("127.0.0.1", {}, "weights must be host:port"),
        ("127.0.0.1:7410", {"cert": "/nowhere/cert"}, "a certificate and its key go together"),
    ],
)
def test_an_address_that_cannot_be_opened_safely_is_refused(address, files, says):
    with pytest.raises(ValueError, match=says):
        ListenAddress("weights", address, **files)


def test_the_command_serves_a_folder_and_refuses_what_is_not_safe(model, tmp_path):
    (token := tmp_path / "token").write_text("the-token-of-the-run")
    run = Run(model, tmp_path / "weights", free_port())
    address = run.url.removeprefix("http://")
    assert "needs a token_file" in fails("weights", "serve", str(run.folder), "--listen", "0.0.0.0:7410", status=2)
    with Running(
        "--token-file", str(token), "weights", "serve", str(run.folder), "--listen", address, stdout=PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"weights of {run.folder} at {address}\n"
        assert address in fails("weights", "serve", str(run.folder), "--listen", address)  # it is in use
        disk = Disk(tmp_path / "cache", weights_token_file=token)
        assert disk.fetch(run.publish(1))[0] == run.files_of(1)
        process.terminate()
    assert process.returncode == 143


@pytest.mark.parametrize(
    ("location", "config", "says"),
    [
        ("http://trainer:7410/step-1", {"weights_root": "http://trainer:741"}, "only from weights_root .*741'"),
        ("http://trainer:7410/mine/../step-1", {"weights_root": "http://trainer:7410/mine"}, "needs a name"),
        ("http://trainer:7410/step-1", {"weights_root": "runs/mine"}, "only from weights_root '.*/runs/mine'"),
        ("http://trainer:7410/step-1", {"weights_cache": None}, "set weights_cache"),
        ("http://trainer:7410/step-1", {}, "only from --weights-root, which is not set. If they are the trainer's"),
        ("http://trainer:7410/step-1", {"weights_root": "https://trainer:7410"}, "loads only from weights_root"),
        ("http://trainer:7410/mine", {"weights_root": "http://trainer:7410"}, "loads only from weights_root"),
        ("http://trainer:7410/", {"weights_root": "http://trainer:7410"}, "loads only from weights_root"),
        ("http://trainer:7410/mine-2/step-1", {"weights_root": "http://trainer:7410/mine"}, "loads only from"),
        ("http://trainer:7410.example.com/step-1", {"weights_root": "http://trainer:7410"}, "cannot be fetched"),
        ("http://trainer:7410/step-1/../../x/step-1", {"weights_root": "http://trainer:7410"}, "needs a name"),
        *[
            (f"http://trainer:7410/mine/{odd}/step-1", {"weights_root": "http://trainer:7410/mine"}, "is no address of")
            for odd in (
                *(
                    "%2e%2e",
                    "%2E%2E",
                    ".%2e",
                    "%2e.",
                    "..%2f..",
                    "%2f",
                    "%5c..",
                    "%252e%252e",
                    "%25252e",
                    "%c0%ae%c0%ae",
                ),
                *(
                    "..\\..",
                    "\\..\\",
                    ".",
                    "..",
                    "",
                    "..;",
                    ";..",
                    "a?b",
                    "a#b",
                    "a b",
                    "a\tb",
                    "a\nb",
                    "\u2025",
                    "a\0",
                ),
            )
        ],
        ("http://trainer:7410/mine/step-1?x=/step-1", {"weights_root": "http://trainer:7410/mine"}, "is no address of"),
        ("http://trainer:7410@evil/mine/step-1", {"weights_root": "http://trainer:7410/mine"}, "is no address of"),
        ("http://evil#@trainer:7410/mine/step-1", {"weights_root": "http://trainer:7410/mine"}, "is no address of"),
        ("http://trainer:0/mine/step-1", {"weights_root": "http://trainer/mine"}, "no server has port 0"),
        ("http://trainer:99999/mine/step-1", {"weights_root": "http://trainer:7410/mine"}, "cannot be fetched"),
    ],
    ids=ascii,
)
async def test_an_address_outside_of_the_root_is_not_asked_and_ends_the_run(tmp_path, location, config, says):
    client, engine = RecordingClient(), ScriptedEngine(probe_scores=[-0.5])
    await client.publish(1, location)
    with pytest.raises(WeightsNotAllowedError, match=says):
        await make_generator(client, engine, max_groups=1, **{"weights_cache": tmp_path, **config}).run()
    assert engine.loaded == []


@pytest.mark.parametrize("root", ["http://127.0.0.1:PORT", "http://127.0.0.1:PORT/"])
def test_the_root_may_be_spelled_in_several_ways(run, tmp_path, root):
    port = run.url.rpartition(":")[2]
    files, _ = Disk(tmp_path / "cache", weights_root=root.replace("PORT", port)).fetch(run.publish(1))
    assert files == run.files_of(1)


@pytest.mark.parametrize("host", ["trainer", "10.0.0.7", "[fd00::7]", "trainer.example.com", "localhost.example.com"])
def test_the_token_goes_to_no_other_machine_unencrypted_unless_the_network_is_trusted(tmp_path, host):
    (token := tmp_path / "token").write_text("the-token-of-the-run")
    with pytest.raises(WeightsNotAllowedError, match=r"refusing to send the token to .*weights_allow_insecure_token"):
        Disk(tmp_path / "cache", weights_token_file=token).fetch(f"http://{host}:7410/step-1")
    trusting = Disk(tmp_path / "cache", weights_token_file=token, weights_allow_insecure_token=True)
    with pytest.raises(WeightsAwayError):
        trusting.fetch("http://127.0.0.1:1/step-1")


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed_and_the_other_address_gets_no_token(tmp_path, status):
    asked: list[str | None] = []

    class Elsewhere(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.headers["Authorization"])
            self.send_error(404)

    class Redirecting(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Location", f"http://127.0.0.1:{elsewhere.server_port}/step-1/manifest.json")
            self.end_headers()

    (token := tmp_path / "token").write_text("the-token-of-the-run")
    with HTTPServer(("127.0.0.1", 0), Elsewhere) as elsewhere, HTTPServer(("127.0.0.1", 0), Redirecting) as server:
        for each in (elsewhere, server):
            threading.Thread(target=each.serve_forever, args=(0.05,), daemon=True).start()
        disk = Disk(tmp_path / "cache", weights_token_file=token)
        with pytest.raises(WeightsNotAllowedError, match="is redirected"):
            disk.fetch(f"http://127.0.0.1:{server.server_port}/step-1")
        for each in (elsewhere, server):
            each.shutdown()
    assert asked == []


FETCHES = """
import sys
from pathlib import Path
from replay_generator import GeneratorConfig
from replay_generator.metrics import GeneratorMetrics
from replay_generator.policy.remote.delta import checksum_of
from replay_generator.policy.remote.fetching import Fetcher
config = GeneratorConfig(weights_cache=sys.argv[1], weights_root=sys.argv[2])
fetcher = Fetcher(config, GeneratorMetrics(solved_reward=1.0).stats)
for line in sys.stdin:
    folder = Path(fetcher.folder_of(line.strip()))
    for _ in range(20):  # as long as an engine reads
        print(folder, checksum_of(folder / "model.safetensors"), flush=True)
    print("done", flush=True)
"""


def test_two_processes_with_one_cache_read_each_version_as_it_was_published(run, tmp_path):
    command = [sys.executable, "-c", FETCHES, str(tmp_path / "cache"), run.url]
    both = [subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True) for _ in range(2)]
    folders: list[set[str]] = [set(), set()]
    for version in range(1, 6):
        location = run.publish(version)
        wanted = checksum_of(run.folder / f"step-{version}/model.safetensors")
        for process in both:
            assert process.stdin is not None
            print(location, file=process.stdin, flush=True)
        for number, process in enumerate(both):
            assert process.stdout is not None
            for line in iter(process.stdout.readline, "done\n"):
                folder, checksum = line.split()
                assert checksum == wanted
                folders[number].add(folder)
    for process in both:
        process.communicate()
        assert process.returncode == 0
    assert len(folders[0]) == 5
    assert len(folders[1]) == 5
    assert not folders[0] & folders[1]


def test_eight_generators_of_one_file_have_a_folder_each_and_find_it_again_when_they_start_anew(run, tmp_path):
    eight = [Disk(tmp_path / "cache") for _ in range(8)]
    location = run.publish(1)
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda disk: disk.fetch(location)[0], eight))
    assert found == [run.files_of(1)] * 8
    names = sorted(path.name for path in (tmp_path / "cache/replay-weights").iterdir() if path.is_dir())
    assert names == [str(number) for number in range(8)]
    del eight[3]
    files, came = Disk(tmp_path / "cache").fetch(run.publish(2))
    assert files == run.files_of(2)
    assert came < run.whole  # from what the fourth one has left


async def test_a_generator_goes_on_with_what_it_has_while_the_weights_cannot_be_had(model, tmp_path, caplog):
    port, client = free_port(), RecordingClient()
    run, engine = Run(model, tmp_path / "weights", port), ScriptedEngine(probe_scores=[-0.5])
    config = {"weights_cache": tmp_path / "cache", "weights_root": run.url}
    generator = make_generator(client, engine, **config)
    with serving(run.folder, port):
        await client.publish(1, run.publish(1))
        task = await running(generator)
        await client.inserted(1)
    with caplog.at_level(logging.WARNING):
        await client.publish(2, run.publish(2))
        await async_until(lambda: "step-2 cannot be fetched" in caplog.text)
    await client.inserted(len(client.inserts) + 5)
    assert {group.policy_version for group, _ in client.inserts} == {1}
    remove(run.folder / "step-2")  # the trainer goes back, and says so after its weights are there
    with serving(run.folder, port):
        await client.publish(3, run.publish(3))
        await async_until(lambda: generator.stats["policy_version"] == 3)
        generator.stop()
        await task
    assert [Path(path).name for path in engine.loaded] == ["step-1", "step-3"]
    assert generator.stats["probe_max_difference"] == 0


async def test_a_generator_without_any_weights_waits_for_them_until_its_timeout(tmp_path):
    client, engine = RecordingClient(), ScriptedEngine()
    await client.publish(1, f"http://127.0.0.1:{free_port()}/step-1")
    location = client.current.weights
    config = {"weights_cache": tmp_path, "weights_root": location.rpartition("/")[0]}
    generator = make_generator(client, engine, stale_timeout=0.5, max_groups=1, **config)
    with pytest.raises(WeightsNotFoundError, match=r"policy 1: .*step-1 cannot be fetched: .*refused.*stale_timeout"):
        await asyncio.wait_for(generator.run(), 60)
    assert engine.loaded == []
    assert client.inserts == []

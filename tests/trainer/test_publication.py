"""Publication beside the training loop: what is written, when, and what happens if it fails; one run in a folder."""

from __future__ import annotations

import multiprocessing
import shutil
import signal
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from replay_client.folder_lock import FolderLock
from replay_trainer import publication
from replay_trainer.background import BackgroundTask, HostCopy
from replay_trainer.weights import publish_weights, published, saved
from tests.kit.clients import FakeClient
from tests.kit.models import assert_same_weights, make_model
from tests.kit.processes import start
from tests.kit.trainers import Killed, killed_in, lines_of, make_batches, make_trainer


def train(client: FakeClient, output_dir: Path, *, tied: bool = False, **options: Any) -> Any:
    """The trained model."""
    trainer = make_trainer(client, output_dir, model=make_model(tied=tied), **({"learning_rate": 1e-2} | options))
    trainer.train()
    return trainer.model


def weights(folder: Path) -> dict[str, torch.Tensor]:
    loaded: dict[str, torch.Tensor] = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    return loaded


def held(monkeypatch: pytest.MonkeyPatch, version: int) -> tuple[threading.Event, threading.Event, list[int]]:
    """Hold the write of a version until the second event is set; the list has the versions that are being written."""
    begun, release, writing = threading.Event(), threading.Event(), list[int]()

    def write(*args: Any, **options: Any) -> Path:
        writing.append(options["version"])
        assert len(writing) == 1  # one at a time
        if options["version"] == version:
            begun.set()
            assert release.wait(60)
        folder = publish_weights(*args, **options)
        writing.remove(options["version"])
        return folder

    monkeypatch.setattr(publication, "publish_weights", write)
    return begun, release, writing


@pytest.mark.parametrize("tied", [False, True])
def test_the_next_step_runs_while_a_version_is_written_and_does_not_change_it(tmp_path, monkeypatch, tied):
    train(FakeClient(make_batches(3)), tmp_path / "front", tied=tied, publish_in_background=False)
    begun, release, writing = held(monkeypatch, version=1)
    client = FakeClient(make_batches(3))
    seen = []

    def on_step(metrics: dict[str, float]) -> None:
        if metrics["step"] == 2:  # its update is done
            assert begun.wait(60)
            seen.append((client.version, list(writing)))
            release.set()

    model = train(client, tmp_path / "back", on_step=on_step, tied=tied, keep_weights=9)
    assert seen == [(0, [1])]
    assert client.version == 3
    assert [folder.name for folder in published(tmp_path / "back")] == ["step-0", "step-1", "step-2", "step-3"]
    for step in (1, 2, 3):
        assert_same_weights(weights(tmp_path / f"front/step-{step}"), weights(tmp_path / f"back/step-{step}"))
    model.save_pretrained(tmp_path / "plain")
    sizes = {(tmp_path / folder / "model.safetensors").stat().st_size for folder in ("plain", "back/step-3")}
    assert len(sizes) == 1  # tied weights are in the file once


def test_a_version_waits_until_the_one_before_is_written(tmp_path, monkeypatch):
    begun, release, writing = held(monkeypatch, version=1)
    waits, begun_3, wait = threading.Event(), threading.Event(), BackgroundTask.wait
    monkeypatch.setattr(BackgroundTask, "wait", lambda *given, **named: waits.set() or wait(*given, **named))
    client = FakeClient(make_batches(4))
    seen = []

    def release_version_1() -> None:
        assert waits.wait(60)
        assert begun.wait(60)  # its thread may come later than this one
        seen.append((begun_3.is_set(), list(writing)))
        release.set()

    def on_step(metrics: dict[str, float]) -> None:
        if metrics["step"] == 2:
            waits.clear()
            threading.Thread(target=release_version_1).start()
        if metrics["step"] == 3:
            begun_3.set()

    train(client, tmp_path, on_step=on_step, max_steps=4)
    assert seen == [(False, [1])]
    assert client.version == 4


@pytest.mark.parametrize("background", [True, False])
def test_a_write_that_fails_stops_the_run_with_the_reason_and_a_resume_goes_on(tmp_path, monkeypatch, background):
    def write(*args: Any, **options: Any) -> Path:
        if options["version"] == 2:
            raise OSError(28, "No space left on device")
        return publish_weights(*args, **options)

    whole = train(FakeClient(make_batches(4)), tmp_path / "whole", max_steps=4)
    options = {"max_steps": 4, "publish_in_background": background}
    client = FakeClient(make_batches(4))
    with monkeypatch.context() as patched:
        patched.setattr(publication, "publish_weights", write)
        words = r"a version could not be published: OSError: .*step-2 cannot be written .* No space left .* continue"
        with pytest.raises(RuntimeError, match=words):
            train(client, tmp_path / "run", **options)
    assert client.version == 1
    assert [folder.name for folder in saved(tmp_path / "run")] == ["step-0", "step-1"]
    resumed = train(client, tmp_path / "run", resume=True, **options)
    assert [line["step"] for line in lines_of(tmp_path / "run")] == [1, 2, 3, 4]
    assert_same_weights(resumed, whole)


def test_an_error_of_the_run_waits_for_the_write_under_way(tmp_path, monkeypatch):
    begun, release, _ = held(monkeypatch, version=1)

    def on_step(metrics: dict[str, float]) -> None:
        if metrics["step"] == 2:
            assert begun.wait(60)
            threading.Timer(0.2, release.set).start()
            raise KeyboardInterrupt

    client = FakeClient(make_batches(3))
    with pytest.raises(KeyboardInterrupt):
        train(client, tmp_path, on_step=on_step)
    assert client.version == 1
    assert [folder.name for folder in saved(tmp_path)] == ["step-0", "step-1"]


@pytest.mark.parametrize("reboot", [True, False])
def test_versions_may_be_published_in_memory_and_full_states_on_disk(tmp_path, reboot):
    memory, run = tmp_path / "memory", tmp_path / "run"
    options = {"max_steps": 6, "save_every": 2, "keep_weights": 2, "weights_dir": memory}
    whole = train(FakeClient(make_batches(6)), tmp_path / "whole", max_steps=6)

    client = FakeClient(make_batches(6))
    with pytest.raises(Killed):
        train(client, run, on_step=killed_in(6), **options)
    assert Path(client.weights) == memory.resolve() / "step-5"
    assert [folder.name for folder in published(memory)] == ["step-4", "step-5"]
    assert saved(memory) == []
    assert saved(run)[-1].name == "step-4"
    if reboot:
        shutil.rmtree(memory)
    resumed = train(client, run, resume=True, **options)
    assert_same_weights(resumed, whole)
    assert Path(client.weights) == memory.resolve() / "step-6"
    assert_same_weights(weights(memory / "step-6"), whole)
    with pytest.raises(FileExistsError, match=r"memory holds step-\d of an earlier run: set resume=True"):
        train(FakeClient(make_batches(6)), tmp_path / "other", **options)


@pytest.mark.parametrize("reboot", [True, False])
def test_deltas_lie_beside_whole_versions_in_the_engines_dtype_and_a_resume_serves_its_version_again(tmp_path, reboot):
    served, run = tmp_path / "served", tmp_path / "run"
    options: dict[str, Any] = {"max_steps": 6, "save_every": 2, "publish": "delta", "weights_dir": served}
    options["weights_url"] = url = "http://trainer:7410"
    whole = train(FakeClient(make_batches(6)), tmp_path / "whole", max_steps=6, tied=True)
    announced: list[tuple[str, str]] = []

    class Client(FakeClient):
        def set_policy_version(self, version: int, weights: str = "", **given: Any) -> None:
            announced.append((weights, published(served)[-1].name))
            super().set_policy_version(version, weights, **given)

    client = Client(make_batches(6))
    with pytest.raises(Killed):
        train(client, run, on_step=killed_in(6), tied=True, **options)
    assert client.weights == f"{url}/step-5"
    assert [folder.name for folder in published(served)] == ["step-3", "step-4", "step-5"]
    assert {path.name for path in (served / "step-5/delta").iterdir()} == {"base.json", "model.safetensors"}
    if reboot:
        shutil.rmtree(served)
    announced.clear()
    resumed = train(client, run, resume=True, tied=True, **options)
    assert announced[0] == (f"{url}/step-4", "step-4")  # it is there before it is announced
    assert announced[-1] == (f"{url}/step-6", "step-6")
    tensors = load_file(served / "step-6/model.safetensors")
    assert {each.dtype for each in tensors.values()} == {torch.bfloat16}
    assert "lm_head.weight" not in tensors  # tied weights are in the file once
    for name, each in resumed.state_dict().items():
        assert name not in tensors or torch.equal(each.to(torch.bfloat16), tensors[name])
    assert_same_weights(resumed, whole)  # what a resume reads has lost no bit


def test_a_delta_that_cannot_be_written_leaves_no_version_behind(tmp_path, monkeypatch):
    def fail(base: Path, folder: Path) -> None:
        (folder / "delta").mkdir()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("replay_trainer.weights.write_deltas", fail)
    client, served = FakeClient(make_batches(2)), tmp_path / "served"
    with pytest.raises(RuntimeError, match=r"step-1 cannot be written .* No space left"):
        train(client, tmp_path / "run", max_steps=2, publish="delta", weights_dir=served)
    assert client.version == 0
    assert client.weights == str(served.resolve() / "step-0")
    assert [folder.name for folder in published(served)] == ["step-0"]


@pytest.mark.parametrize("options", [{"publish": "delta"}, {"weights_url": "https://trainer:7410"}])
def test_what_generators_fetch_lies_apart_from_training_checkpoints(tmp_path, options):
    for folder in (None, tmp_path / "run", tmp_path / "x/../run"):
        with pytest.raises(ValueError, match="need a weights_dir that is not output_dir"):
            make_trainer(FakeClient(), tmp_path / "run", weights_dir=folder, **options)


def test_a_host_copy_keeps_its_values_and_what_is_tied():
    a, b = torch.arange(4.0), torch.ones(2, 3)
    tree = {"a": a, "tied": a, "list": [b, 7, None], "empty": torch.zeros(0)}
    copy = HostCopy()
    first = copy.take(tree)
    copy.wait()
    a.zero_()
    assert first["a"].tolist() == [0, 1, 2, 3]
    assert first["tied"] is first["a"]
    assert first["list"][1:] == [7, None]
    assert first["list"][0].data_ptr() != b.data_ptr()
    again = copy.take(tree)
    assert again["a"].data_ptr() == first["a"].data_ptr()  # no second allocation
    assert again["a"].tolist() == [0] * 4


def test_a_wait_ends_when_nobody_wants_it_and_the_error_of_a_task_is_told_once():
    go_on, task = threading.Event(), BackgroundTask("test")
    task.start(lambda: go_on.wait(60) and 1 / 0)  # type: ignore[arg-type, return-value]
    assert not task.wait(lambda: False)
    go_on.set()
    assert task.wait()
    assert isinstance(task.take_error(), ZeroDivisionError)
    assert task.take_error() is None


@pytest.mark.parametrize("name", ["trainer.pt", "model.safetensors", "config.json"])
def test_a_state_with_other_bytes_is_refused_and_the_one_before_can_be_used(tmp_path, name):
    options = {"max_steps": 3, "keep_weights": 9}
    whole = train(FakeClient(make_batches(3)), tmp_path / "whole", **options)
    train(FakeClient(make_batches(3)), tmp_path / "run", **options | {"max_steps": 2})
    damaged = tmp_path / "run/step-2" / name
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    with pytest.raises(ValueError, match=rf"step-2/{name} is damaged: .* move step-2 out of its folder to resume"):
        train(FakeClient(make_batches(3)), tmp_path / "run", resume=True, **options)
    (tmp_path / "run/step-2").rename(tmp_path / "step-2")
    resumed = train(FakeClient(make_batches(3)), tmp_path / "run", resume=True, **options)
    assert_same_weights(resumed, whole)


def test_weights_that_compute_nan_are_neither_published_nor_saved(tmp_path):
    client = FakeClient(make_batches(4))
    train(client, tmp_path, max_steps=2)
    for _ in range(2):  # the same error again, until the cause is gone
        with pytest.raises(
            FloatingPointError, match=r"last good version is 2, in .*step-2\. Continue .*step-2.* \(now 1e\+30\)"
        ):
            train(client, tmp_path, max_steps=4, resume=True, learning_rate=1e30)
        assert [folder.name for folder in published(tmp_path)] == ["step-0", "step-1", "step-2"]
        assert client.version == 2
        assert client.weights == str(tmp_path.resolve() / "step-2")
        assert client.deleted == []  # the groups are not to blame
    train(client, tmp_path, max_steps=4, resume=True)
    assert client.version == 4


def test_a_model_that_computes_nan_from_the_start_is_not_published(tmp_path):
    model = make_model()
    model.lm_head.weight.data[:] = torch.nan
    with pytest.raises(FloatingPointError, match="before any step: its weights are damaged"):
        make_trainer(FakeClient(make_batches(1)), tmp_path, model=model).train()
    assert published(tmp_path) == []


def hold(folder: Path, answers: Connection) -> None:
    lock = FolderLock(folder)
    answers.send(lock.acquire() or "locked")
    signal.pause()


def test_a_trainer_is_refused_while_another_process_trains_in_the_folder_and_not_after_its_death(tmp_path):
    folder = tmp_path / "run"
    answer, answers = multiprocessing.Pipe(duplex=False)
    holder = start(hold, folder, answers)
    try:
        assert answer.recv() == "locked"
        client = FakeClient(make_batches(1))
        trainer = make_trainer(client, folder, max_steps=1)
        with pytest.raises(RuntimeError, match=rf"in use by another training run \(process {holder.pid} on "):
            trainer.train()
        assert client.weights == ""
        assert not any(folder.glob("step-*"))
    finally:
        holder.kill()
        holder.join()
    # The kernel has freed the lock of the killed process. Its file is still there.
    assert (folder / ".lock").exists()
    trainer.train()
    assert client.version == 1
    lock = FolderLock(folder)
    assert lock.acquire() == ""
    lock.release()

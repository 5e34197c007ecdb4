"""Errors of writing name the file. /dev/full is a disk without space."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from replay_trainer.callbacks import append_lines
from replay_trainer.weights import writing
from tests.kit.clients import FakeClient
from tests.kit.models import VOCABULARY
from tests.kit.trainers import make_batches, make_trainer

FULL = Path("/dev/full")


@pytest.mark.parametrize(
    "write",
    [
        lambda path: append_lines(path, [{"step": 1}]),
        lambda path: path.write_text("text"),
        lambda path: torch.save(torch.zeros(9), path),
    ],
    ids=["lines", "text", "tensors"],
)
def test_a_full_disk_is_named_by_the_file_and_its_free_space(tmp_path, write):
    (tmp_path / "file").symlink_to(FULL)
    with (
        pytest.raises(OSError, match=rf"{tmp_path}/file cannot be written \(\d+ MiB are free there\): .*"),
        writing(tmp_path / "file", RuntimeError, SafetensorError),
    ):
        write(tmp_path / "file")


def test_an_error_that_says_where_stays_as_it_is(tmp_path):
    with pytest.raises(FileNotFoundError) as caught, writing(tmp_path):
        (tmp_path / "none/file").write_text("")
    assert caught.value.filename == str(tmp_path / "none/file")


class FillingTokenizer:
    """A tokenizer with whose files the disk of version 1 is full."""

    all_special_ids: tuple[int, ...] = ()

    def __len__(self) -> int:
        return VOCABULARY

    def save_pretrained(self, folder: Path) -> None:
        if folder.name.startswith("step-1"):
            (folder / "probe.json").symlink_to(FULL)


def test_a_run_on_a_full_disk_says_which_version_it_could_not_write(tmp_path):
    trainer = make_trainer(FakeClient(make_batches(2)), tmp_path, max_steps=2, groups_per_step=3)
    trainer.tokenizer = FillingTokenizer()
    words = r"a version could not be published: OSError: .*step-1 cannot be written .*No space left on device"
    with pytest.raises(RuntimeError, match=words):
        trainer.train()


def test_without_torch_the_import_says_what_to_install():
    code = "import sys; sys.modules['torch'] = None; from replay_trainer import GRPOTrainer"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith(
        "ModuleNotFoundError: replay_trainer needs torch: install this package with its extra 'trainer'"
    )

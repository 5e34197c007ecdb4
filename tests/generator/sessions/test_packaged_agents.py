"""Clients of the package indexes, as they are, in environments of their own: `make test-long` makes them.

What each does is compared with what stands on the page; `make agents-page` renews that.
"""

import json
from dataclasses import replace

import pytest

from tests.docs.tables import renewed, table_of
from tests.generator.sessions.agents.catalog import AGENTS, CLIENTS, NODE, OLDER, Client, NodePackages, names_a_commit
from tests.generator.sessions.agents.play import observe
from tests.generator.sessions.agents.table import MARK, PAGE, lines_of, observed
from tests.packages import ROOT

NAMES = [client.name for client in CLIENTS]


def why_skipped(client: Client) -> str:
    if isinstance(client.packages, NodePackages):
        return f"make test-long makes {client.packages.folder.name} where node and npm are"
    return f"make test-long makes {client.packages.folder.name}"


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("client", CLIENTS, ids=NAMES)
async def test_a_client_is_trained_on_as_the_engine_drew_it_and_as_the_page_says(client):
    if not client.packages.is_there:
        pytest.skip(why_skipped(client))
    assert await observe(client) == observed()[client.name]


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_the_messages_of_commits_that_aider_asks_another_model_for_are_not_trained_on():
    (aider,) = [client for client in CLIENTS if client.name == "aider"]
    if not aider.packages.is_there:
        pytest.skip(why_skipped(aider))
    command = aider.command.replace("--model openai/policy", "--model openai/policy --weak-model openai/titles")
    seen = await observe(replace(aider, command=command), ("titles",), names_a_commit)
    assert seen["turns"] == observed()["aider"]["turns"]
    assert seen["sequences"] == 2  # it writes the file twice, and asks for three messages beside


# ------------------------------------------------------------------------------------------------ the page


def test_the_table_of_the_page_is_that_of_the_last_observations():
    rows = list(observed().values())
    assert [row["client"] for row in rows] == NAMES, "run make agents-page"
    page = PAGE.read_text()
    assert table_of(page, MARK) == lines_of(rows), "run python -m tests.generator.sessions.agents.table --page"
    assert renewed(page, MARK, lines_of(rows)) == page


@pytest.mark.parametrize("client", CLIENTS, ids=NAMES)
def test_a_client_was_observed_in_the_version_that_is_locked(client):
    assert observed()[client.name]["package"] == client.package
    assert observed()[client.name]["version"] == client.packages.locked(client.package), "run make agents-page"


def test_each_client_has_called_two_tools_or_edited_twice_and_a_refusal_has_not_stopped_it():
    for row in observed().values():
        assert row["turns"] >= 2, row
        assert row["sequences"] <= row["turns"], row


def test_the_lock_file_of_npm_names_no_registry_and_the_digest_of_each_package():
    packages = json.loads(NODE.lock.read_text())["packages"]
    del packages[""]
    for name, about in packages.items():
        assert "resolved" not in about, name
        assert about["integrity"].startswith("sha512-"), name


def test_the_clients_of_npm_are_locked_as_package_json_names_them():
    named = json.loads((NODE.lock.parent / "package.json").read_text())["dependencies"]
    assert named == {name: NODE.locked(name) for name in named}
    assert {client.package for client in CLIENTS if client.packages is NODE} <= named.keys()


def test_make_clean_removes_the_environments_of_agents():
    (line,) = [line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith("\trm -rf $(VENV) ")]
    assert {"$(AGENTS)", "$(AGENTS_OLDER)", "$(AGENTS_NODE)"} <= {*line.split()}
    for packages in (AGENTS, OLDER, NODE):
        assert f":= {packages.folder.relative_to(ROOT)}\n" in (ROOT / "Makefile").read_text()

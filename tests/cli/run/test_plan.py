"""What follows from a run file: files and commands of its parts, a recipe below it, and --set above it."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from replay_cli import quiet
from replay_cli.recipes import recipe_of
from replay_cli.run.plan import environment_of, read_run
from replay_server import Config
from tests.cli.run.runs import ABSENT, write_run
from tests.kit.golden import sections

QUEUE = {"name": "fresh", "rate_limiter": {"type": "queue", "max_size": 64}, "forward_to": "pool"}
POOL = {"name": "pool"}


def plan_of(folder: Path, changes=None, sets=(), recipe=None):
    return read_run(write_run(folder, changes), sets, recipe, os.environ)


def file_of(plan, name):
    """The settings in the file of a part."""
    return tomllib.loads(plan.files[plan.output_dir / "config" / f"{name}.toml"])


def text_of(plan) -> str:
    """What a plan says of its parts, their commands, and the files that they read. RUN stands for the output_dir."""
    texts = {"parts": "\n".join(plan.describe())}
    for part in (plan.server, plan.trainer, *plan.generators):
        variables = [f"{name}={value}" for name, value in part.environment.items()]
        texts[part.name] = " ".join([*variables, *part.command])
    tables = Config.model_validate(file_of(plan, "serve")).tables
    texts["tables of the server"] = ", ".join(table.name for table in tables)
    for path, text in plan.files.items():
        texts[f"{path}"] = text
    return sections(texts).replace(str(plan.output_dir), "RUN").replace(sys.executable, "python")


def test_a_run_file_without_a_server_gives_a_queue_a_pool_and_permits_that_fit_the_trainer(
    tmp_path, monkeypatch, golden
):
    monkeypatch.chdir(tmp_path)
    plan = plan_of(tmp_path)
    assert plan.output_dir == tmp_path / "runs" / "mine"
    assert plan.train_dir == plan.output_dir / "train"
    assert plan.max_steps == 200
    assert plan.listen == "127.0.0.1:0"
    assert not plan.output_dir.exists()
    golden("plans/default.txt", text_of(plan))


UNSCORED = {
    "generate.prompts_table": "prompts",
    "generate.partial_groups_table": "partial",
    "generate.unscored_table": "unscored",
    "generate.reward": ABSENT,
}
TABLES = {
    "train.rollouts_table": "fresh",
    "train.replay_table": "pool",
    "generate.tables": ["fresh"],
    "serve.tables": [QUEUE, POOL],
    "serve.server": {"data_dir": "elsewhere", "listen": "127.0.0.1:7401"},
    "serve.admission": {"max_staleness": 1},
}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("plans/two_generators.txt", {"generate.processes": 2, "generate.seed": 7}),
        ("plans/unscored_table.txt", UNSCORED),
        ("plans/curriculum.txt", {"generate.prompts_table": "prompts", "generate.prompts_mode": "curriculum"}),
        ("plans/tables_of_a_person.txt", TABLES),
    ],
)
def test_each_part_is_a_command_with_a_file_that_has_what_it_needs_of_the_others(tmp_path, golden, name, changes):
    plan = plan_of(tmp_path, changes)
    golden(name, text_of(plan))


def test_a_part_on_gpus_has_them_to_itself(tmp_path, monkeypatch, golden):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    golden("plans/gpus.txt", text_of(plan_of(tmp_path, {"generate.gpus": "0,1", "train.gpus": "2-3"})))


def test_the_environment_of_a_part_has_nothing_of_other_servers(tmp_path):
    plan = plan_of(tmp_path)
    environment = environment_of(plan.server, {"HOME": "/home/me", "REPLAY_ADDRESS": "x:1", "REPLAY_TOKEN": "y"})
    assert environment == {"HOME": "/home/me"}


def test_a_part_decides_for_itself_which_libraries_it_quiets(tmp_path, monkeypatch):
    monkeypatch.setattr(quiet, "QUIETED", {"GRPC_VERBOSITY"})
    plan = plan_of(tmp_path)
    environment = environment_of(plan.server, {"GRPC_VERBOSITY": "NONE", "HF_HUB_VERBOSITY": "error"})
    assert environment == {"HF_HUB_VERBOSITY": "error"}


@pytest.mark.parametrize(
    ("changes", "root", "cache"),
    [
        ({"train.weights_dir": "/dev/shm/w"}, "/dev/shm/w", None),
        ({"train.weights_dir": "/dev/shm/w", "train.weights_url": "http://h:1/w"}, "http://h:1/w", "weights-cache"),
    ],
)
def test_generators_load_only_where_the_trainer_publishes(tmp_path, changes, root, cache):
    plan = plan_of(tmp_path, changes)
    generate = file_of(plan, "generate")
    assert generate["weights_root"] == root
    assert generate.get("weights_cache") == (cache and str(plan.output_dir / cache))


@pytest.mark.parametrize(
    ("changes", "fresh"),
    [
        ({"train.replay_share": 0.25}, 24),
        ({"train.zero_variance": "dynamic"}, 320),
        ({"train.zero_variance": "dynamic", "train.max_dynamic_batches": 3}, 96),
        ({"train.zero_variance": "dynamic", "serve.admission": {"fresh_groups_per_step": 80}}, 80),
    ],
)
def test_permits_follow_from_the_fresh_groups_of_a_step(tmp_path, changes, fresh):
    admission = file_of(plan_of(tmp_path, changes), "serve")["admission"]
    assert admission["fresh_groups_per_step"] == fresh


@pytest.mark.parametrize("tables", [{}, {"serve.tables": []}], ids=["absent", "empty"])
def test_tables_have_the_names_of_the_trainer_and_groups_go_there(tables, tmp_path):
    plan = plan_of(tmp_path, {"train.rollouts_table": "fresh", "train.replay_table": "pool"} | tables)
    names = [table["name"] for table in file_of(plan, "serve")["tables"]]
    assert names == ["fresh", "pool"]
    assert file_of(plan, "generate")["tables"] == ["fresh"]


@pytest.mark.parametrize(
    "changes",
    [{"generate.partial_groups_table": ""}, {"serve.admission": {"permit_tables": []}}],
    ids=["an empty text", "permits of no table"],
)
def test_generators_store_no_partial_groups_where_a_person_says_so(tmp_path, changes):
    plan = plan_of(tmp_path, changes)
    server = Config.model_validate(file_of(plan, "serve"))
    assert server.admission.permit_tables == ()
    assert "partial_groups_table" not in file_of(plan, "generate")


def test_a_recipe_is_a_run_file_in_part(tmp_path):
    """The four fresh groups of the recipe give way to those of a step."""
    plan = plan_of(tmp_path, {"train.groups_per_step": 16, "generate.priority": "advantage"}, recipe="replay")
    recipe = recipe_of("replay")
    serve, train, generate = (file_of(plan, name) for name in ("serve", "train", "generate"))
    permits = {"permit_tables": ["partial_groups"]}
    assert serve["admission"] == {"fresh_groups_per_step": 8, "max_staleness": 1} | permits
    assert serve["tables"] == recipe["serve"]["tables"]
    assert train["groups_per_step"] == 16
    assert train["replay_share"] == 0.5
    assert train["correction"] == recipe["train"]["correction"]
    assert generate["priority"] == "advantage"
    assert generate["tables"] == ["rollouts"]


def test_a_recipe_that_there_is_not_is_one_line(tmp_path):
    with pytest.raises(ValueError, match="recipe must be one of replay, not 'repaly'"):
        plan_of(tmp_path, recipe="repaly")


def test_set_changes_a_field_by_its_dotted_name(tmp_path):
    sets = [
        "train.max_steps=100",
        "train.correction.clip_max=3.5",
        'generate.reward=["exact_match", "my_rewards:brevity=0.1"]',
        "generate.max-tokens=64",
        "serve.server.max_bytes=8GB",
        "output_dir=elsewhere",
    ]
    plan = plan_of(tmp_path, sets=sets)
    assert plan.max_steps == 100
    assert file_of(plan, "train")["correction"] == {"clip_max": 3.5}
    assert file_of(plan, "generate")["reward"] == ["exact_match", "my_rewards:brevity=0.1"]
    assert file_of(plan, "generate")["max_tokens"] == 64
    assert file_of(plan, "serve")["server"]["max_bytes"] == "8GB"
    assert plan.output_dir.name == "elsewhere"


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("train.max_steps", "--set 'train.max_steps' is not NAME=VALUE"),
        ("train.max_step=3", "run.toml: [train] there is no 'max_step'; did you mean 'max_steps'?"),
        ("trian.max_steps=3", "run.toml: there is no 'trian'; did you mean 'train'?"),
        ("model.name=x", "--set model.name=x: model is no section: change it in the file"),
        ("train.scale_rewards=null", "--set train.scale_rewards=null: a run file has no null: take the setting out"),
    ],
)
def test_a_set_that_is_wrong_is_one_line(tmp_path, monkeypatch, given, line):
    monkeypatch.chdir(tmp_path)
    write_run(Path())
    with pytest.raises(ValueError) as raised:  # noqa: PT011  the words are compared
        read_run(Path("run.toml"), [given], None, os.environ)
    assert str(raised.value).startswith(line)


def test_advantages_of_a_function_and_a_trainer_that_scales_them_again_exclude_each_other(tmp_path):
    own = {"generate.advantages": "tests.generator.own_advantages:leave_one_out"}
    assert file_of(plan_of(tmp_path, own), "generate")["advantages"] == own["generate.advantages"]
    with pytest.raises(ValueError, match=r"run.toml: \[train\] scale_rewards: scale_rewards = 'none' of the trainer"):
        plan_of(tmp_path, own | {"train.scale_rewards": "none"})


@pytest.mark.parametrize(("text", "why"), [("model = ", "Invalid value"), ("\xff", "it is not text")])
def test_a_file_that_is_none_is_one_line(tmp_path, text, why):
    path = tmp_path / "run.toml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=why):
        read_run(path, (), None, os.environ)
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        read_run(tmp_path / "none.toml", (), None, os.environ)


def test_parts_reach_a_server_with_tokens_by_a_file_of_their_own(tmp_path):
    token = tmp_path / "token"
    token.write_text("secret")
    changes = {
        "serve.security": {"tokens_file": str(tmp_path / "tokens.toml")},
        "client": {"token_file": str(token)},
    }
    plan = plan_of(tmp_path, changes)
    assert plan.client_config == plan.output_dir / "config" / "client.toml"
    assert file_of(plan, "client") == {"token_file": str(token)}
    assert plan.trainer.command[3:5] == ("--client-config", str(plan.client_config))
    assert plan.generators[0].command[3:5] == ("--client-config", str(plan.client_config))
    assert "--client-config" not in plan.server.command
    assert not [text for text in plan.files.values() if "secret" in text]


def test_a_run_file_is_read_without_torch_and_without_users_code(tmp_path):
    path = write_run(tmp_path)
    code = (
        "import os, sys; from pathlib import Path; from replay_cli.run.plan import read_run;"
        f"read_run(Path({str(path)!r}), (), None, os.environ);"
        "print(*{'torch', 'transformers', 'vllm', 'my_rewards'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == []

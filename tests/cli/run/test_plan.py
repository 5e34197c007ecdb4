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
from replay_cli.run.plan import SERVER_PATIENCE, environment_of, read_run
from replay_server import Config
from tests.cli.run.runs import ABSENT, write_run

QUEUE = {"name": "fresh", "rate_limiter": {"type": "queue", "max_size": 64}, "forward_to": "pool"}
POOL = {"name": "pool"}


def plan_of(folder: Path, changes=None, sets=(), recipe=None):
    return read_run(write_run(folder, changes), sets, recipe, os.environ)


def file_of(plan, name):
    """The settings in the file of a part."""
    return tomllib.loads(plan.files[plan.output_dir / "config" / f"{name}.toml"])


def test_a_run_file_without_a_server_gives_a_queue_a_pool_and_permits_that_fit_the_trainer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = plan_of(tmp_path)
    assert plan.output_dir == tmp_path / "runs" / "mine"
    assert plan.train_dir == plan.output_dir / "train"
    assert plan.max_steps == 200
    assert plan.listen == "127.0.0.1:0"
    server = Config.model_validate(file_of(plan, "serve"))
    assert server.server.data_dir == plan.output_dir / "server"
    assert server.admission.fresh_groups_per_step == 32
    assert server.admission.max_staleness == 2
    queue, pool, partial_groups = server.tables
    assert partial_groups.name == "partial_groups"
    assert server.admission.permit_tables == ("partial_groups",)
    assert file_of(plan, "generate")["partial_groups_table"] == "partial_groups"
    assert queue.name == "rollouts"
    assert queue.rate_limiter.max_size == 128
    assert queue.forward_to == "replay"
    assert pool.name == "replay"
    assert pool.max_size == 1024
    assert pool.sampler.type == "prioritized"


def test_generators_and_trainer_have_what_they_need_of_each_other_in_their_files(tmp_path):
    plan = plan_of(tmp_path, {"generate.processes": 2, "generate.seed": 7})
    train = file_of(plan, "train")
    assert train["model"] == "Qwen/Qwen3-0.6B"
    assert train["output_dir"] == str(plan.train_dir)
    assert train["resume"] is True
    first, second = (file_of(plan, f"generate-{number}") for number in (1, 2))
    assert first["weights_root"] == str(plan.train_dir)
    assert first["wait_for_policy"] is True
    assert first["metrics_path"] == str(plan.generator_metrics[0])
    assert second["metrics_path"] == str(plan.generator_metrics[1])
    assert plan.generator_metrics[1] == plan.output_dir / "generator-2.jsonl"
    assert first["seed"] == 7
    assert second["seed"] == 8
    assert "processes" not in first


def test_each_part_is_a_command_with_its_file(tmp_path):
    plan = plan_of(tmp_path)
    config = plan.output_dir / "config"
    replay = (sys.executable, "-m", "replay_cli")
    assert plan.server.command == (*replay, "serve", "--config", str(config / "serve.toml"))
    assert plan.trainer.command == (*replay, "train", "--config", str(config / "train.toml"))
    assert [part.name for part in plan.generators] == ["generator"]
    waits = ("--timeout", SERVER_PATIENCE)
    assert plan.generators[0].command == (*replay, *waits, "generate", "--config", str(config / "generate.toml"))
    assert {*plan.files} == {config / f"{name}.toml" for name in ("serve", "train", "generate")}
    assert not plan.output_dir.exists()


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


def test_tables_have_the_names_of_the_trainer_and_groups_go_there(tmp_path):
    plan = plan_of(tmp_path, {"train.rollouts_table": "fresh", "train.replay_table": "pool"})
    names = [table["name"] for table in file_of(plan, "serve")["tables"]]
    assert names == ["fresh", "pool"]
    assert file_of(plan, "generate")["tables"] == ["fresh"]


def test_tables_that_generators_need_are_there(tmp_path):
    changes = {
        "generate.prompts_table": "prompts",
        "generate.partial_groups_table": "partial",
        "generate.unscored_table": "unscored",
        "generate.reward": ABSENT,
    }
    server = Config.model_validate(file_of(plan_of(tmp_path, changes), "serve"))
    tables = {table.name: table for table in server.tables}
    assert tables["prompts"].max_times_sampled == 1
    assert server.admission.permit_tables == ("partial", "unscored")
    assert {"partial", "unscored"} <= tables.keys()
    changes = {"generate.prompts_table": "prompts", "generate.prompts_mode": "curriculum"}
    server = Config.model_validate(file_of(plan_of(tmp_path, changes), "serve"))
    tables = {table.name: table for table in server.tables}
    assert tables["prompts"].sampler.type == "prioritized"


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


def test_the_tables_of_a_person_are_taken_as_they_are(tmp_path):
    changes = {
        "train.rollouts_table": "fresh",
        "train.replay_table": "pool",
        "generate.tables": ["fresh"],
        "serve.tables": [QUEUE, POOL],
        "serve.server": {"data_dir": "elsewhere", "listen": "127.0.0.1:7401"},
        "serve.admission": {"max_staleness": 1},
    }
    plan = plan_of(tmp_path, changes)
    serve = file_of(plan, "serve")
    assert serve["tables"] == [QUEUE, POOL]
    assert serve["server"] == {"data_dir": "elsewhere", "listen": "127.0.0.1:7401"}
    permits = {"permit_tables": ["partial_groups"]}
    assert serve["admission"] == {"max_staleness": 1, "fresh_groups_per_step": 32} | permits
    assert plan.listen == "127.0.0.1:7401"


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


def test_the_plan_describes_each_part_in_a_line(tmp_path):
    changes = {"generate.gpus": "0,1", "train.gpus": "2-3"}
    plan = read_run(write_run(tmp_path, changes), (), None, os.environ | {"CUDA_VISIBLE_DEVICES": "4,5,6,7"})
    assert plan.describe() == [
        f"server       replay serve, listens on 127.0.0.1:0, data in {plan.output_dir / 'server'}",
        "trainer      replay train, 200 steps, 2 ranks, GPU 6,7",
        "generator-1  replay generate, engine vllm, GPU 4",
        "generator-2  replay generate, engine vllm, GPU 5",
    ]


def test_a_run_file_is_read_without_torch_and_without_users_code(tmp_path):
    path = write_run(tmp_path)
    code = (
        "import os, sys; from pathlib import Path; from replay_cli.run.plan import read_run;"
        f"read_run(Path({str(path)!r}), (), None, os.environ);"
        "print(*{'torch', 'transformers', 'vllm', 'my_rewards'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == []

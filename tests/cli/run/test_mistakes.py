"""Mistakes in a run file: each is one line with section and field, and nothing is started or written."""

from __future__ import annotations

import os
from pathlib import Path

from replay_cli.run.plan import read_run
from tests.cli.run.runs import ABSENT, write_run
from tests.kit.golden import error_of, sections

QUEUE = {"name": "rollouts", "rate_limiter": {"type": "queue", "max_size": 64}}
POOL = {"name": "replay"}
FEW = {"name": "rollouts", "rate_limiter": {"type": "queue", "max_size": 8}}
ALL_TABLES = {"serve.tables": [QUEUE, POOL]}
GPUS = {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}

MISTAKES = {
    # Names and types above the sections.
    "no model": {"model": ABSENT},
    "a folder that is not there": {"model": "./nothing"},
    "no output_dir": {"output_dir": ABSENT},
    "a name above the sections": {"modle": "x"},
    "a section that is none": {"serve": 3},
    "shared_gpus is no switch": {"shared_gpus": "yes"},
    # Fields of sections.
    "a name in generate": {"generate.max_token": 3},
    "a type in generate": {"generate.max_tokens": "many"},
    "a range in generate": {"generate.temperature": 0.0},
    "an option of generate": {"generate.seed": "x"},
    "two fields of generate": {"generate.group_size": 4, "generate.min_rollouts": 5},
    "a group of one": {"generate.group_size": 1},
    "no prompts": {"generate.prompts": ABSENT},
    "no reward": {"generate.reward": ABSENT},
    "an engine": {"generate.engine": "vlm"},
    "a server's address is missing": {"generate.engine": "vllm-server"},
    "models that are not trained, without agents": {"generate.untrained_models": ["titles"]},
    "two ways to play": {"generate.rollout": "a:b", "generate.agent": "true"},
    "an argument of the engine": {"generate.engine_arg": ["dtype"]},
    "no process": {"generate.processes": 0},
    "one address of several processes": {
        "generate.processes": 2,
        "generate.reward": ABSENT,
        "generate.sessions": "127.0.0.1:0",
    },
    "a name in train": {"train.learning_rte": 1e-5},
    "a range in train": {"train.max_steps": 0},
    "two fields of train": {"train.replay_share": 0.9, "train.groups_per_step": 1},
    "a field of the correction": {"train.correction": {"clip_maxx": 2.0}},
    "an evaluation without prompts": {"train.eval_reward": ["exact_match"]},
    "a field of an evaluation": {"train.eval_prompts": "x", "train.evaluation": {"chatt": True}},
    "an adapter that is not there": {"train.lora": {"adapter": "nothing"}},
    "a section of the server": {"serve.sever": {}},
    "a field of the server": {"serve.server": {"listn": "x"}},
    "an address of the server": {"serve.server": {"listen": "7400"}},
    "a field of a table": {"serve.tables": [QUEUE, POOL | {"max_sizes": 3}]},
    "a table in one bracket": {"serve.tables": QUEUE},
    "a field of the client": {"client.tokenfile": "x"},
    "a number for the client": {"client.token_file": 3},
    # What is derived.
    "the model of a section": {"generate.model": "x"},
    "wait_for_policy": {"generate.wait_for_policy": True},
    "weights_root": {"generate.weights_root": "runs"},
    "metrics_path": {"generate.metrics_path": "x"},
    "the trainer's folder": {"train.output_dir": "x"},
    "resume": {"train.resume": False},
    "fresh groups": {"serve.admission": {"fresh_groups_per_step": 32}},
    "too few fresh groups for dynamic": {
        "train.zero_variance": "dynamic",
        "serve.admission": {"fresh_groups_per_step": 32},
    },
    "the client's address": {"client.address": "127.0.0.1:7400"},
    "a secret": {"client.token": "secret"},
    # What must agree.
    "no table of the trainer": ALL_TABLES | {"train.rollouts_table": "rolouts"},
    "no pool": {"serve.tables": [QUEUE]},
    "no table of the generator": ALL_TABLES | {"generate.tables": ["fresh"]},
    "groups that do not reach the trainer": ALL_TABLES | {"generate.tables": ["replay"]},
    "no table of prompts": ALL_TABLES | {"generate.prompts_table": "prompts"},
    "a GPU of both sides, which name none": {},
    "a queue too small for a step": {"generate.gpus": "0", "train.gpus": "1", "serve.tables": [FEW, POOL]},
    "tokens without a client's": {"serve.security": {"tokens_file": "tokens.toml"}},
    "TLS without a client's": {"serve.security": {"tls_cert": "a.pem", "tls_key": "b.pem"}},
    "a client's TLS alone": {"client.tls": True},
    "a token file that is not there": {"client.token_file": "nothing"},
    # GPUs.
    "no such GPU": {"generate.gpus": "0,7", "train.gpus": "1"},
    "no GPUs at all": {"generate.gpus": "first", "train.gpus": "1"},
    "a GPU twice": {"generate.gpus": "0-1,1", "train.gpus": "2"},
    "a range that goes back": {"generate.gpus": "3-1", "train.gpus": "0"},
    "a GPU of both sides": {"generate.gpus": "0,1", "train.gpus": "1-2"},
    "a side that names none": {"train.gpus": "0"},
    "GPUs that cannot be shared out": {
        "generate.gpus": "0-2",
        "train.gpus": "3",
        "generate.engine_arg": {"tensor_parallel_size": 2},
    },
    "too many GPUs for the processes": {"generate.gpus": "0-2", "train.gpus": "3", "generate.processes": 2},
    "no number of GPUs": {
        "generate.gpus": "0",
        "train.gpus": "3",
        "generate.engine_arg": {"tensor_parallel_size": "two"},
    },
    "GPUs of an engine elsewhere": {
        "generate.engine": "vllm-server",
        "generate.base_url": "http://h:1",
        "generate.gpus": "0",
        "train.gpus": "1",
    },
    "groups that ranks cannot share": {"generate.gpus": "0", "train.gpus": "1-3"},
}
"""What is changed in a run file; tests/golden/errors/run_files.txt has the line that each mistake gets."""


def test_a_mistake_is_one_line_with_section_and_field_and_nothing_is_written(tmp_path, monkeypatch, golden):
    monkeypatch.chdir(tmp_path)
    lines = {}
    for name, changes in MISTAKES.items():
        write_run(Path(), changes)
        lines[name] = error_of(read_run, Path("run.toml"), (), None, os.environ | GPUS)
        assert "\n" not in lines[name]
        assert [file.name for file in tmp_path.iterdir()] == ["run.toml"]
    golden("errors/run_files.txt", sections(lines))

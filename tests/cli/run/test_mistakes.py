"""Mistakes in a run file: each is one line with section and field, and nothing is started or written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from replay_cli.run.plan import read_run
from tests.cli.run.runs import ABSENT, write_run

QUEUE = {"name": "rollouts", "rate_limiter": {"type": "queue", "max_size": 64}}
POOL = {"name": "replay"}
FEW = {"name": "rollouts", "rate_limiter": {"type": "queue", "max_size": 8}}
ALL_TABLES = {"serve.tables": [QUEUE, POOL]}
GPUS = {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}

MISTAKES = {
    # Names and types above the sections.
    "no model": ({"model": ABSENT}, 'model is needed above all sections, for example model = "Qwen/Qwen3-0.6B"'),
    "a folder that is not there": ({"model": "./nothing"}, "model: there is no folder ./nothing"),
    "no output_dir": (
        {"output_dir": ABSENT},
        'output_dir is needed above all sections, for example output_dir = "runs/mine"',
    ),
    "a name above the sections": ({"modle": "x"}, "there is no 'modle'; did you mean 'model'?"),
    "a section that is none": ({"serve": 3}, "serve is a section: [serve], not serve = 3"),
    "shared_gpus is no switch": ({"shared_gpus": "yes"}, "shared_gpus must be true or false, not 'yes'"),
    # Fields of sections.
    "a name in generate": ({"generate.max_token": 3}, "[generate] there is no 'max_token'; did you mean 'max_tokens'?"),
    "a type in generate": (
        {"generate.max_tokens": "many"},
        "[generate] max_tokens must be a whole number, not 'many'",
    ),
    "a range in generate": (
        {"generate.temperature": 0.0},
        "[generate] temperature must be greater than 0, not 0.0",
    ),
    "an option of generate": (
        {"generate.seed": "x"},
        "[generate] seed must be a whole number",
    ),
    "two fields of generate": (
        {"generate.group_size": 4, "generate.min_rollouts": 5},
        "[generate] min_rollouts 5 is more than group_size 4",
    ),
    "a group of one": (
        {"generate.group_size": 1},
        "[generate] group_size 1: a group of one has no variance, so its advantage is 0 and it teaches nothing: make "
        "it 2 or more, or let [train] have a teacher (teacher_weight)",
    ),
    "no prompts": ({"generate.prompts": ABSENT}, "[generate] prompts is needed, or environment verifiers:NAME"),
    "no reward": (
        {"generate.reward": ABSENT},
        "[generate] reward exact_match or reward package.module:function is needed",
    ),
    "an engine": ({"generate.engine": "vlm"}, "[generate] engine must be vllm, vllm-server or transformers, not 'vlm'"),
    "a server's address is missing": (
        {"generate.engine": "vllm-server"},
        "[generate] engine vllm-server and base_url http://host:port need each other",
    ),
    "models that are not trained, without agents": (
        {"generate.untrained_models": ["titles"]},
        "[generate] untrained_models needs agent or sessions: nobody else asks by the name of a model",
    ),
    "two ways to play": (
        {"generate.rollout": "a:b", "generate.agent": "true"},
        "[generate] rollout and agent exclude each other: each says who plays the rollouts",
    ),
    "an argument of the engine": (
        {"generate.engine_arg": ["dtype"]},
        "[generate] engine_arg 'dtype' is not NAME=VALUE",
    ),
    "no process": ({"generate.processes": 0}, "[generate] processes must be a whole number from 1, not 0"),
    "one address of several processes": (
        {"generate.processes": 2, "generate.reward": ABSENT, "generate.sessions": "127.0.0.1:0"},
        "[generate] sessions: 2 processes cannot listen on one address: make it one",
    ),
    "a name in train": (
        {"train.learning_rte": 1e-5},
        "[train] there is no 'learning_rte'; did you mean 'learning_rate'?",
    ),
    "a range in train": (
        {"train.max_steps": 0},
        "[train] max_steps must be at least 1, not 0",
    ),
    "two fields of train": (
        {"train.replay_share": 0.9, "train.groups_per_step": 1},
        "[train] groups_per_step=1 with replay_share=0.9 leaves no fresh group: raise groups_per_step or "
        "lower replay_share",
    ),
    "a field of the correction": (
        {"train.correction": {"clip_maxx": 2.0}},
        "[train] correction: CorrectionConfig: there is no 'clip_maxx'; did you mean 'clip_max'?",
    ),
    "an evaluation without prompts": ({"train.eval_reward": ["exact_match"]}, "[train] eval_reward needs eval_prompts"),
    "a field of an evaluation": (
        {"train.eval_prompts": "x", "train.evaluation": {"chatt": True}},
        "[train.evaluation]: there is no 'chatt'; did you mean 'chat'?",
    ),
    "an adapter that is not there": (
        {"train.lora": {"adapter": "nothing"}},
        "[train.lora] adapter: the folder nothing holds no adapter_config.json",
    ),
    "a section of the server": ({"serve.sever": {}}, "[serve] there is no 'sever'; did you mean 'server'?"),
    "a field of the server": (
        {"serve.server": {"listn": "x"}},
        "[serve.server] there is no 'listn'; did you mean 'listen'?",
    ),
    "an address of the server": (
        {"serve.server": {"listen": "7400"}},
        "[serve.server] listen must be host:port, for example 127.0.0.1:7401, and the port at most 65535, not '7400'",
    ),
    "a field of a table": (
        {"serve.tables": [QUEUE, POOL | {"max_sizes": 3}]},
        "[[serve.tables]] number 2: there is no 'max_sizes'; did you mean 'max_size'?",
    ),
    "a table in one bracket": (
        {"serve.tables": QUEUE},
        "[serve] tables is a section: write [[serve.tables]], not tables = ...",
    ),
    "a field of the client": (
        {"client.tokenfile": "x"},
        "[client] there is no 'tokenfile'; did you mean 'token_file'?",
    ),
    # What is derived.
    "the model of a section": (
        {"generate.model": "x"},
        "[generate] model: leave it out: model stands above all sections, for generators and trainer alike",
    ),
    "wait_for_policy": (
        {"generate.wait_for_policy": True},
        "[generate] wait_for_policy: leave it out: generators of a run wait for the weights of its trainer",
    ),
    "weights_root": (
        {"generate.weights_root": "runs"},
        "[generate] weights_root: leave it out: generators of a run load the weights of its trainer alone",
    ),
    "metrics_path": (
        {"generate.metrics_path": "x"},
        "[generate] metrics_path: leave it out: generators of a run write generator-1.jsonl, ... into output_dir",
    ),
    "the trainer's folder": (
        {"train.output_dir": "x"},
        "[train] output_dir: leave it out: the trainer of a run writes into the folder train of the "
        "output_dir above all sections",
    ),
    "resume": (
        {"train.resume": False},
        "[train] resume: leave it out: a run always goes on with what is in its output_dir",
    ),
    "fresh groups": (
        {"serve.admission": {"fresh_groups_per_step": 32}},
        "[serve.admission] fresh_groups_per_step: leave it out: it follows from [train], whose steps take 32 "
        "fresh groups",
    ),
    "too few fresh groups for dynamic": (
        {"train.zero_variance": "dynamic", "serve.admission": {"fresh_groups_per_step": 32}},
        "[serve.admission] fresh_groups_per_step: the server's [admission] lets 32 fresh groups a step be "
        "generated, and this trainer takes 33 or more (zero_variance='dynamic'): it would wait for ever. "
        "Raise fresh_groups_per_step there to 32 divided by the share of groups with variance; 320 is always "
        "enough",
    ),
    "the client's address": (
        {"client.address": "127.0.0.1:7400"},
        "[client] address: leave it out: the parts of a run know the address of its server",
    ),
    "a secret": (
        {"client.token": "secret"},
        "[client] token: leave it out: a secret stands in a file of its own: token_file",
    ),
    # What must agree.
    "no table of the trainer": (
        ALL_TABLES | {"train.rollouts_table": "rolouts"},
        "[train] rollouts_table: in [[serve.tables]] there is no 'rolouts'; did you mean 'rollouts'?",
    ),
    "no pool": (
        {"serve.tables": [QUEUE]},
        "[train] replay_table: in [[serve.tables]] there is no 'replay'; there are rollouts, partial_groups",
    ),
    "no table of the generator": (
        ALL_TABLES | {"generate.tables": ["fresh"]},
        "[generate] tables: in [[serve.tables]] there is no 'fresh'; there are rollouts, replay, partial_groups",
    ),
    "groups that do not reach the trainer": (
        ALL_TABLES | {"generate.tables": ["replay"]},
        "[generate] tables: groups of replay never get to the rollouts_table of [train], 'rollouts': name it "
        "here, or let one of these forward_to it",
    ),
    "no table of prompts": (
        ALL_TABLES | {"generate.prompts_table": "prompts"},
        "[generate] prompts_table: in [[serve.tables]] there is no 'prompts'; there are rollouts, replay, "
        "partial_groups",
    ),
    "a GPU of both sides, which name none": (
        {},
        "[train] gpus: GPU 0 is that of [generate] too, for [generate] names none and takes the first: name others, or "
        "set shared_gpus = true above all sections",
    ),
    "a queue too small for a step": (
        {"generate.gpus": "0", "train.gpus": "1", "serve.tables": [FEW, POOL]},
        "[[serve.tables]] rollouts.rate_limiter: a queue of 8 never holds the 32 fresh groups that are drawn "
        "at once: max_size = 128 does",
    ),
    "tokens without a client's": (
        {"serve.security": {"tokens_file": "tokens.toml"}},
        "[client] token_file is needed, for [serve.security] has tokens_file",
    ),
    "TLS without a client's": (
        {"serve.security": {"tls_cert": "a.pem", "tls_key": "b.pem"}},
        "[client] tls_ca is needed, for [serve.security] has tls_cert",
    ),
    "a client's TLS alone": (
        {"client.tls": True},
        "[client] asks for TLS, and the server has none: set tls_cert and tls_key in [serve.security]",
    ),
    "a token file that is not there": (
        {"client.token_file": "nothing"},
        "[client] token_file nothing cannot be read: No such file or directory",
    ),
    # GPUs.
    "no such GPU": (
        {"generate.gpus": "0,7", "train.gpus": "1"},
        "[generate] gpus: there is no GPU 7; CUDA_VISIBLE_DEVICES=0,1,2,3 shows 4, and numbers begin with 0",
    ),
    "no GPUs at all": (
        {"generate.gpus": "first", "train.gpus": "1"},
        '[generate] gpus: \'first\' names no GPUs: write "0,1", "2-7", [0, 1] or UUIDs ("GPU-...")',
    ),
    "a GPU twice": ({"generate.gpus": "0-1,1", "train.gpus": "2"}, "[generate] gpus: '0-1,1' names the GPU 1 twice"),
    "a range that goes back": (
        {"generate.gpus": "3-1", "train.gpus": "0"},
        "[generate] gpus: '3-1' is no range of GPUs: the first comes first, and 1024 is the most",
    ),
    "a GPU of both sides": (
        {"generate.gpus": "0,1", "train.gpus": "1-2"},
        "[train] gpus: GPU 1 is that of [generate] too: name others, or set shared_gpus = true above all sections",
    ),
    "a side that names none": (
        {"train.gpus": "0"},
        "[train] gpus: GPU 0 is that of [generate] too, for [generate] names none and takes the first: name "
        "others, or set shared_gpus = true above all sections",
    ),
    "GPUs that cannot be shared out": (
        {"generate.gpus": "0-2", "train.gpus": "3", "generate.engine_arg": {"tensor_parallel_size": 2}},
        "[generate] gpus: 3 cannot be shared out, for an engine takes 2 of them (engine_arg: "
        "tensor_parallel_size and the like)",
    ),
    "too many GPUs for the processes": (
        {"generate.gpus": "0-2", "train.gpus": "3", "generate.processes": 2},
        "[generate] gpus: 2 processes need 2, not 3, for an engine takes 1 of them (engine_arg: "
        "tensor_parallel_size and the like)",
    ),
    "no number of GPUs": (
        {"generate.gpus": "0", "train.gpus": "3", "generate.engine_arg": {"tensor_parallel_size": "two"}},
        "[generate] engine_arg: tensor_parallel_size must be a whole number from 1, not 'two'",
    ),
    "GPUs of an engine elsewhere": (
        {"generate.engine": "vllm-server", "generate.base_url": "http://h:1", "generate.gpus": "0", "train.gpus": "1"},
        "[generate] gpus: leave it out: with engine vllm-server, engines and their GPUs are elsewhere",
    ),
    "groups that ranks cannot share": (
        {"generate.gpus": "0", "train.gpus": "1-3"},
        "[train] groups_per_step: 32 fresh groups of a step cannot be shared out among the 3 GPUs: a multiple of 3 can",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_with_section_and_field_and_nothing_is_written(tmp_path, monkeypatch, name):
    changes, line = MISTAKES[name]
    monkeypatch.chdir(tmp_path)
    write_run(Path(), changes)
    with pytest.raises(ValueError) as raised:  # noqa: PT011  the whole line is compared
        read_run(Path("run.toml"), (), None, os.environ | GPUS)
    assert str(raised.value) == f"run.toml: {line}"
    assert [file.name for file in tmp_path.iterdir()] == ["run.toml"]

"""The real vLLM, on small models. Loading takes 15 to 25 s each time, so most tests share one engine and one loop."""

import asyncio
import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import pytest_asyncio

from replay_client import ReplayClient
from replay_client.testing import until
from replay_generator import GeneratorConfig, RolloutGenerator, WeightsMismatchError
from replay_generator.engines import SamplingConfig
from replay_generator.engines.vllm import VLLMEngine, masks_of
from replay_server import ReplayServer, TableConfig
from tests.generator.engines.vllm_rollouts import TOOL, group_of, two_turns
from tests.kit.clients import FakeClient, RecordingClient
from tests.kit.engines import check_group, check_scores, under_way
from tests.kit.generators import make_prompts
from tests.kit.groups import make_sample
from tests.kit.models import loaded, make_adapter, make_version, save_model
from tests.kit.trainers import lines_of, make_trainer

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed", allow_module_level=True)

pytestmark = pytest.mark.vllm
on_the_engines_loop = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def version(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_version(model, tmp_path_factory.mktemp("versions") / "step-1")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def loaded_engine(model: Path) -> AsyncIterator[VLLMEngine]:
    engine = VLLMEngine(model, dtype="float32", seed=0, enable_lora=True, max_lora_rank=16)
    yield engine
    await engine.close()
    await engine.close()


@pytest_asyncio.fixture(loop_scope="module")
async def engine(loaded_engine: VLLMEngine, model: Path) -> VLLMEngine:
    """The engine with the model's own weights."""
    await loaded_engine.load_weights(str(model), 0)
    return loaded_engine


@pytest.mark.long
@on_the_engines_loop
async def test_the_trainer_finds_the_logprobs_of_what_min_p_kept(engine, model, tmp_path):
    # So high that never all 27 tokens are kept: such a set is the whole vocabulary, and counts as unknown.
    sampling = SamplingConfig(min_p=0.5, max_tokens=16)
    group = await group_of(engine, two_turns(sampling), [3, 9, 4], sampling, 8)
    small = {"groups_per_step": 1, "max_steps": 1, "learning_rate": 0.0}
    trainer = make_trainer(FakeClient([[make_sample(group)]]), tmp_path, model=loaded(model), **small)
    await asyncio.to_thread(trainer.train)
    (line,) = lines_of(tmp_path)
    assert abs(line["correction/kl"]) < 1e-5
    assert line["correction/unknown_masks_fraction"] == 0


def test_the_sets_that_vllm_itself_tells_are_taken_up_to_the_wanted_size():
    from vllm.outputs import CompletionOutput, SamplingMask

    output = CompletionOutput(0, "", [7, 8, 9], None, None, sampling_mask=SamplingMask([[7, 1], [8], [9, 1, 2]]))
    assert masks_of(output, 0, 2) == [[7, 1], [8], []]
    assert masks_of(output, 0, 0) == []


@on_the_engines_loop
async def test_more_seeded_prompts_at_a_time_than_a_batch_of_vllm_holds_are_completed(engine):
    prompts = [[3 + number % 5, *[4 + number % 7] * 55] for number in range(24)]
    requests = [engine.generate(prompt, SamplingConfig(max_tokens=4, seed=7), 8) for prompt in prompts]
    groups = await asyncio.gather(*requests)  # 10,752 tokens of prompts; a batch holds 2,048
    assert [len(group) for group in groups] == [8] * 24
    (alone,) = await asyncio.gather(engine.generate(prompts[0], SamplingConfig(max_tokens=4, seed=7), 8))
    assert [each.token_ids for each in alone] == [each.token_ids for each in groups[0]]
    assert alone[0].token_ids != alone[1].token_ids


@on_the_engines_loop
async def test_every_turn_of_a_rollout_has_the_logprobs_of_the_whole_sequence_before_it(engine, model):
    sampling = SamplingConfig(temperature=0.8, max_tokens=12)
    group = await group_of(engine, two_turns(sampling), [3, 9, 4], sampling, 16)
    check_group(group, sampling, model)
    for span, ids in zip(group.sequence_spans(), group.completions(), strict=True):
        assert ids[~group.trained_mask[span]].tolist() == TOOL


@on_the_engines_loop
async def test_turns_before_and_after_new_weights_have_logprobs_and_the_version_of_their_own(engine, model, version):
    sampling = SamplingConfig(temperature=0.7, max_tokens=48)
    hook = two_turns(SamplingConfig(temperature=0.7, max_tokens=6), lambda: engine.load_weights(str(version), 1), 12)
    group = await group_of(engine, hook, [3, 9, 4], sampling, 12)
    assert group.policy_version == 0
    assert group.policy_version_end == 1
    check_group(group, sampling, {0: model, 1: version})
    for span, ids in zip(group.sequence_spans(), group.completions(), strict=True):
        (answer, _) = np.flatnonzero(~group.trained_mask[span]).tolist()
        of_turns = group.extras["policy_versions"][span].tolist()
        assert ids[answer : answer + 2].tolist() == TOOL
        assert {*of_turns[: answer + 2]} == {0}  # the tool's tokens have the version of those before them
        assert {*of_turns[answer + 2 :]} == {1}


@on_the_engines_loop
async def test_the_first_adapter_waits_for_requests_that_began_without_one(engine, adapters):
    early = asyncio.create_task(engine.generate([3, 9, 4], SamplingConfig(max_tokens=40, seed=3), 8))
    await under_way(engine)
    await engine.load_weights(str(adapters[0]), 1)
    assert {version for completion in await early for version in completion.policy_versions} == {0}
    await check_scores(engine, adapters[0])


@on_the_engines_loop
async def test_an_adapter_that_is_gone_or_too_large_is_an_error_and_whole_weights_take_it_away(
    engine, model, adapters, tmp_path
):
    with pytest.raises(FileNotFoundError, match="gone"):
        await engine.load_weights(str(tmp_path / "gone"), 3)
    with pytest.raises(Exception, match="rank"):
        await engine.load_weights(str(make_adapter(model, tmp_path / "large", rank=32)), 3)
    for version, weights in enumerate((adapters[0], model), start=4):
        await engine.load_weights(str(weights), version)
        await check_scores(engine, weights)


@on_the_engines_loop
async def test_a_failed_reload_holds_completions_until_one_succeeds(engine, model, version, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"half a file")
    for _ in range(50):  # a process that stands still for long finds the completions at their end
        await engine.load_weights(str(model), 0)
        task = asyncio.create_task(engine.generate([3, 9], SamplingConfig(max_tokens=60, seed=2), 32))
        await under_way(engine)
        with pytest.raises(FileNotFoundError, match="gone"):
            await engine.load_weights(str(tmp_path / "gone"), 1)
        with pytest.raises(Exception, match="collective_rpc"):
            await engine.load_weights(str(tmp_path), 1)
        later = asyncio.create_task(engine.generate([4], SamplingConfig(max_tokens=2), 1))
        await asyncio.sleep(0)  # it is asked for before the reload
        await engine.load_weights(str(version), 2)
        assert {v for completion in await later for v in completion.policy_versions} == {2}
        versions = {v for completion in await task for v in completion.policy_versions}
        if versions != {0}:
            break
    # Nothing went on with what the failed reload left: the versions would say so.
    assert versions == {0, 2}
    await check_scores(engine, version)


@pytest.mark.long
@on_the_engines_loop
async def test_tied_embeddings_end_in_right_weights_or_in_a_clear_error_whenever_they_are_reloaded(tmp_path):
    tied = save_model(tmp_path / "tied", tied=True)
    step = make_version(tied, tmp_path / "step-1")
    client = RecordingClient()
    engine = VLLMEngine(tied, dtype="float32", seed=0)
    sampling = SamplingConfig(max_tokens=40)
    config = GeneratorConfig(group_size=2, max_groups=200, sampling=sampling, reload="in_flight")
    generator = RolloutGenerator(client, engine, make_prompts(), lambda row, text: 0.0, config)  # type: ignore[arg-type]
    error = None
    run = asyncio.create_task(generator.run())
    await client.inserted(2)
    await client.publish(1, step)
    try:
        await run
    except WeightsMismatchError as raised:
        error = raised
    difference = generator.stats["probe_max_difference"]
    print(f"tied embeddings after a reload: off by {difference:.3g} nats at most")
    if error is None:
        assert difference < 1e-3
    else:
        assert difference > config.probe_tolerance
        assert "tied embeddings" in str(error)
        assert {group.policy_version_end or group.policy_version for group, _ in client.inserts} == {0}


# --------------------------------------------------------------------------------------------- processes

GENERATOR = """
import sys
from tests.kit.clients import RecordingClient
from tests.kit.generators import make_prompts
from replay_generator.engines.vllm import VLLMEngine, masks_of
from replay_generator import run_generator

def reward(row, text):
    return 0.0

def show(stats):
    print(stats["groups"], flush=True)

if __name__ == "__main__":
    engine = VLLMEngine(sys.argv[1], dtype="float32")
    print("loaded", flush=True)
    run_generator(RecordingClient, engine, make_prompts(10**6), reward, on_group=show)
    print("stopped", flush=True)
"""


@pytest.fixture(scope="module")
def generators(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[subprocess.Popen[str]]]:
    """Two generators in processes (and process groups) of their own, past their first group."""
    script = tmp_path_factory.mktemp("script") / "generate.py"
    script.write_text(GENERATOR)
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(model)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        for _ in range(2)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "loaded\n"
            assert process.stdout.readline() == "1\n"
        yield processes
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def processes_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    processes = psutil.Process(process.pid).children(recursive=True)
    assert any("EngineCore" in " ".join(child.cmdline()) for child in processes)
    return processes


def expect_gone(processes: list[psutil.Process], seconds: float) -> None:
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    assert not [child for child in alive if child.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.long
def test_ctrl_c_stops_the_generator_without_a_stack_trace(generators):
    process = generators[0]
    processes = processes_of(process)
    os.killpg(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=90)
    assert process.returncode == 0
    assert output.endswith("stopped\n")
    assert "Traceback" not in errors
    assert len(errors.splitlines()) <= 3, errors
    expect_gone(processes, seconds=5)


@pytest.mark.long
def test_the_engine_does_not_outlive_a_killed_generator(generators):
    process = generators[1]
    assert (
        "replay_generator.engines.vllm_process" not in sys.modules
    )  # a forked engine process would not import it again
    processes = processes_of(process)
    process.kill()
    expect_gone(processes, seconds=10)


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("request", r"RuntimeError: CPU Generator does not use offset \(vLLM's log: \S+vllm\.log\)"),
        ("kill", r"its process ended without a word; was it killed, for example for its memory\?"),
    ],
    ids=["by a request", "by a signal"],
)
def test_an_engine_that_dies_ends_the_command_with_one_sentence(model, tmp_path, how, why):
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": "1+" * 27 + str(n)}) + "\n" for n in range(9))
    )
    (tmp_path / "rewards.py").write_text("def length(row, text):\n    return len(text)\n")
    command = [sys.executable, "-m", "replay_cli", "generate", "--model", str(model)]
    command += ["--prompts", str(tmp_path / "prompts.jsonl"), "--reward", "rewards:length", "--max-tokens", "4"]
    if how == "request":  # somebody switches on what this engine switches off, and no prompt fits into a step
        for argument in ("enable_chunked_prefill=true", "max_num_seqs=4", "max_num_batched_tokens=16"):
            command += ["--engine-arg", argument]
    # Without what the engine of the other tests has set in this process.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    tables = [TableConfig(name="rollouts", sampler="fifo", max_size=10)]
    with ReplayServer(tables, port=0) as server, ReplayClient(server.address) as client:
        process = subprocess.Popen(
            [*command[:3], "--address", server.address, *command[3:]],
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env=environment,
        )
        try:
            if how == "kill":
                until(lambda: client.server_info().tables["rollouts"].size, timeout=120.0)
                for child in processes_of(process):
                    if "EngineCore" in " ".join(child.cmdline()):
                        child.kill()
            _, errors = process.communicate(timeout=300)
        finally:
            process.kill()
    lines = [line for line in errors.splitlines() if "Triton is installed" not in line]
    assert process.returncode == 1, errors
    assert re.fullmatch(rf"replay: the vLLM engine died: {why}\. What was inserted is safe: .*", "\n".join(lines)), (
        errors
    )

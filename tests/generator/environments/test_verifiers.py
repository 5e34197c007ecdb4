"""Environments of the real `verifiers`: each token of a group is one that the engine drew, or one that it was given.

`verifiers` needs other versions of what vLLM brings, so `make test` runs this file in an environment of its own.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from replay_cli.app import app
from replay_client import AsyncReplayClient, ReplayClient, RolloutGroup
from replay_client.scoring import group_advantages
from replay_client.testing import async_until
from replay_generator import GeneratorConfig, PromptError, RolloutGenerator
from replay_generator.engines import Completion, EngineError, SamplingConfig
from replay_generator.engines.transformers import TransformersEngine
from replay_generator.groups import inserting
from replay_generator.prompts.prompt import Prompt
from replay_generator.rollouts.environments import load_environment
from replay_generator.testing import EOS
from replay_server import ReplayServer, TableConfig
from tests.docs.blocks import ROOT, write_files
from tests.generator.test_noticed import said_by_doctor
from tests.kit.clients import RecordingClient
from tests.kit.clocks import in_a_thread
from tests.kit.engines import RecordedEngine, assert_drawn, parts
from tests.kit.models import make_chat_tokenizer, recomputed, save_model
from tests.kit.prompts import EPOCH
from tests.kit.servers import async_serving
from tests.kit.trainers import lines_of, make_trainer

pytest.importorskip("verifiers", reason="make test runs it in .venv-verifiers")

ENVIRONMENTS = Path(__file__).parent
SAMPLING = SamplingConfig(temperature=0.8, max_tokens=5)
HERE = {"runtime": {"type": "subprocess"}}
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose chat template writes the messages one after the other, those of the policy with their end."""
    return make_chat_model(tmp_path_factory.mktemp("model"))


def make_chat_model(folder: Path, **options: Any) -> Path:
    save_model(folder, **options)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def _modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """verifiers finds an environment as a module of its name."""
    monkeypatch.syspath_prepend(str(ENVIRONMENTS))


def make_environment(name: str, **args: Any) -> Any:
    return load_environment(f"verifiers:{name}", {"agent": HERE} | args)


async def generate(environment: Any, engine: Any, client: Any = None, **config: Any) -> tuple[Any, list[RolloutGroup]]:
    """The statistics of a run, and its groups."""
    client = RecordingClient() if client is None else client
    config = {"group_size": 4, "max_groups": 1, "max_concurrent_groups": 2, "sampling": SAMPLING} | config
    prompts = environment.prompts(0)
    generator = RolloutGenerator(client, engine, prompts, config=GeneratorConfig(**config), rollout=environment)
    await generator.run()
    return generator.stats, [group for group, _ in client.inserts]


# ------------------------------------------------------------------------------------------- what a group holds


async def test_one_turn_is_what_the_engine_drew_with_the_environments_reward(model, tmp_path):
    engine = RecordedEngine(model)
    metrics = {"metrics_path": tmp_path / "m.jsonl", "metrics_interval": 3600.0}
    _, groups = await generate(make_environment("sums"), engine, max_groups=3, **metrics)
    assert_drawn(groups, engine)
    assert len({group.prompt_id for group in groups}) == 3
    for group in groups:
        text = engine.tokenizer.decode(group.prompt_ids)
        texts = [engine.tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in group.completions()]
        right = np.array([said == str(int(text[0]) + 1) for said in texts], np.float32)
        digits = np.array([0.5 * sum(map(str.isdigit, said)) / max(1, len(said)) for said in texts], np.float32)
        np.testing.assert_allclose(group.extras["rewards/rollout/right"], right)
        np.testing.assert_allclose(group.extras["rewards/rollout/digits"], digits, rtol=1e-6)
        np.testing.assert_allclose(group.rewards, right + digits, rtol=1e-6)
        np.testing.assert_allclose(group.advantages, group_advantages(group.rewards), rtol=1e-6)
        assert group.loss_mask is group.sequence_counts is None
    (line,) = map(json.loads, (tmp_path / "m.jsonl").read_text().splitlines())
    assert line["reward/rollout"] == pytest.approx(line["reward_mean"])
    assert line["reward/rollout/letters"] is not None


async def test_of_several_turns_only_the_policys_are_trained_and_none_is_tokenized_again(model):
    engine = RecordedEngine(model)
    _, groups = await generate(make_environment("guesses", rounds=3), engine, max_groups=2)
    assert_drawn(groups, engine)
    for group in groups:
        assert group.sequence_counts is None
        assert group.rewards.tolist() == [3.0] * 4
        for turns, ids, span in zip(group.meta["turns"], group.completions(), group.sequence_spans(), strict=True):
            assert [role for role, _ in turns] == ["prompt", "assistant", "user", "assistant", "user", "assistant"]
            lengths = [tokens for _, tokens in turns[1:]]
            said, heard, *_ = np.split(ids, np.cumsum(lengths)[:-1])
            # The environment answers "{}?" with the number of even digits; a turn that was cut gets its end first.
            even = sum(character in "02468" for character in engine.tokenizer.decode(said, skip_special_tokens=True))
            end = [] if said[-1] == EOS else [EOS]
            assert heard.tolist() == [*end, *engine.tokenizer.encode(f"{even}?")]
            assert group.trained_mask[span].tolist() == [
                role == "assistant" for role, tokens in turns[1:] for _ in range(tokens)
            ]
            expected = np.array(recomputed(model, group.prompt_ids.tolist(), ids.tolist(), SAMPLING))
            trained = group.trained_mask[span]
            np.testing.assert_allclose(group.rollout_logprobs[span][trained], expected[trained], atol=1e-4)


async def test_each_branch_is_a_sequence_and_a_turn_that_several_share_is_trained_on_once(model):
    engine = RecordedEngine(model)
    _, (group,) = await generate(make_environment("forks"), engine, group_size=2)
    assert_drawn([group], engine)
    assert group.group_size == 2
    assert group.num_sequences == 6
    assert group.sequence_counts is not None
    assert group.sequence_counts.tolist() == [3, 3]
    assert group.rewards.tolist() == [3.0, 3.0]
    roles = [[role for role, _ in turns] for turns in group.meta["turns"]]
    assert roles[:3] == roles[3:]
    assert roles[:3] == [
        ["prompt", "assistant", "user", "assistant"],
        ["prompt", "earlier", "user", "assistant"],
        ["prompt", "assistant"],
    ]


async def test_an_agent_that_is_not_trained_asks_the_policy_and_is_left_out(model):
    """With the shipped environment user-sim: the policy is the user too."""
    seat = HERE | {"harness": {"id": "sums"}, "max_turns": 2}
    args = {"id": "user-sim", "user": seat, "assistant": seat, "persona": "2+2?"}
    environment = load_environment("verifiers:sums", args)
    engine = RecordedEngine(model)
    _, (group,) = await generate(environment, engine)
    trained = [(before, part.token_ids) for before, part in parts(group)]
    drawn = [(asked, completion.token_ids) for asked, completion in engine.drawn]
    assert trained
    assert len(trained) < len(drawn)
    assert all(each in drawn for each in trained)


# ------------------------------------------------------------------------------------------- what the policy reads


STRICT = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') if messages|length == 1 }}{% endif %}"
    "{% for m in messages %}[{{ m['role'] }}:{{ m['content'] }}"
    "{% for call in m.tool_calls %}{{ call.function.arguments.city }}{% endfor %}]{% endfor %}"
    "{% if add_generation_prompt %}{{ opening or '(' }}{% endif %}"
)
"""A chat template that refuses a system message alone, and wants texts as content and objects as arguments."""
CHATS: dict[str, tuple[list[dict[str, Any]], str]] = {
    "a null field": ([{"role": "user", "content": "1+1=", "name": None, "tool_calls": None}], "[user:1+1=]("),
    "content in parts": (
        [{"role": "user", "content": [{"type": "text", "text": "1+"}, {"type": "text", "text": "1="}]}],
        "[user:1+1=](",
    ),
    "a system message": (
        [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+1="}],
        "[system:be brief][user:1+1=](",
    ),
    "a call without content": (
        [
            {"role": "user", "content": "?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": '{"city": "rome"}'}}],
            },
            {"role": "tool", "content": "9"},
        ],
        "[user:?][assistant:rome][tool:9](",
    ),
    "words of the assistant": (
        [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "it is"}],
        "[user:1+1=](it is",
    ),
}


@pytest.mark.parametrize(("messages", "expected"), CHATS.values(), ids=CHATS)
def test_a_chat_of_an_environment_is_rendered_as_all_others_are(messages, expected):
    from replay_generator.rollouts.environments.template_renderer import TemplateRenderer

    tokenizer = make_chat_tokenizer(STRICT)
    rendered = TemplateRenderer(tokenizer).render(messages, add_generation_prompt=True)
    assert tokenizer.decode(rendered.token_ids) == expected
    assert len(rendered.message_indices) == len(rendered.token_ids)
    assert rendered.token_ids == Prompt.of(messages).tokenize(tokenizer)


async def test_the_template_of_an_environment_gets_the_arguments_of_the_generator(tmp_path):
    folder = make_chat_model(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE + "{% if add_generation_prompt %}{{ opening }}{% endif %}"
    tokenizer.save_pretrained(folder)
    _, (group,) = await generate(
        make_environment("sums"), RecordedEngine(folder), chat_template_kwargs={"opening": "=9"}
    )
    assert tokenizer.decode(group.prompt_ids).endswith("+1==9")


class LongAgo(datetime):
    """A clock that stands on a day in 1987."""

    @classmethod
    def now(cls, tz=None):
        return cls(1987, 6, 5, 23, 59)


async def test_the_template_of_an_environment_gets_the_day_on_which_the_group_began(tmp_path, monkeypatch):
    folder = make_chat_model(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE + "{% if add_generation_prompt %}{{ strftime_now('%Y') }}{% endif %}"
    tokenizer.save_pretrained(folder)
    monkeypatch.setattr("replay_generator.generator.datetime", LongAgo)
    _, (group,) = await generate(make_environment("sums"), RecordedEngine(folder))
    assert tokenizer.decode(group.prompt_ids).endswith("1987")


# -------------------------------------------------------------------------------------------------- what fails


async def test_an_episode_that_fails_loses_its_own_rollout(model):
    environment = make_environment("guesses", fails_at=1)
    engine = RecordedEngine(model)
    stats, (group,) = await generate(environment, engine, min_rollouts=2)
    assert group.group_size == 2
    assert stats["rollouts_failed"] == 2
    assert group.rewards.tolist() == [2.0, 2.0]


async def test_too_few_episodes_end_the_run_with_the_reason_of_the_environment(model):
    environment = make_environment("guesses", fails_at=1)
    with pytest.raises(PromptError, match=r"2 of 4 rollouts failed.*OSError: the browser of episode \d is gone"):
        await generate(environment, RecordedEngine(model))


async def test_an_engine_that_dies_ends_the_run_with_its_own_error(model):
    engine = RecordedEngine(model)
    engine.fails_after = 3
    with pytest.raises(EngineError, match="the engine is gone"):
        await generate(make_environment("guesses"), engine)


async def test_a_rollout_that_takes_too_long_ends_and_so_does_its_request(model):
    class Stuck(RecordedEngine):
        under_way = 0

        async def generate(
            self, prompt_ids: Sequence[int], sampling: SamplingConfig, n: int, *_: Any
        ) -> list[Completion]:
            self.under_way += 1
            try:
                await asyncio.Event().wait()
            finally:
                self.under_way -= 1
            raise AssertionError

    engine = Stuck(model)
    with pytest.raises(PromptError, match=r"it took longer than 0.5 s \(rollout_timeout\)"):
        await generate(make_environment("sums"), engine, rollout_timeout=0.5)
    assert engine.under_way == 0


async def test_an_environment_that_draws_otherwise_than_the_trainer_assumes_is_refused(model):
    environment = make_environment("sums", agent=HERE | {"sampling": {"temperature": 0.5}})
    with pytest.raises(PromptError, match=r"drew with temperature 0.5, and the trainer assumes that of the generator"):
        await generate(environment, RecordedEngine(model))


@pytest.mark.parametrize(
    ("name", "args", "words"),
    [
        ("no-such", {}, "environment 'verifiers:no-such': taskset 'no-such' not found"),
        ("broken", {}, "environment 'verifiers:broken': it needs the module 'a_package_that_nobody_has', which is"),
        ("sums", {"agent": {"max_turn": 3}}, r"environment 'verifiers:sums': .*max_turn is no setting"),
        ("sums", {"taskset": {"largest": "nine"}}, r"environment 'verifiers:sums': .*largest must be a"),
        ("sums", {"taskset": 3}, "environment 'verifiers:sums': taskset must be an object, not 3"),
        ("sums", {"id": "no-such"}, "environment 'verifiers:sums': environment 'no-such' not found"),
        ("sums", {"renderer": {"name": "nobody"}}, "environment 'verifiers:sums': .*renderer"),
    ],
    ids=["unknown", "import", "field", "value", "kind", "env", "renderer"],
)
def test_an_environment_that_cannot_work_is_refused_in_one_line(name, args, words):
    with pytest.raises(ValueError, match=words) as raised:
        load_environment(f"verifiers:{name}", args)
    assert "\n" not in str(raised.value)


def test_an_environment_without_tasks_is_refused():
    environment = make_environment("sums", taskset={"largest": -1})
    with pytest.raises(ValueError, match="environment 'verifiers:sums' has no tasks"):
        environment.prompts(0)


# ---------------------------------------------------------------------------------- what its address tells and bounds


async def test_requests_of_an_episode_that_wait_for_the_policy_are_told_as_waiting(model):
    class Held(RecordedEngine):
        held = asyncio.Event()

        async def generate(
            self, prompt_ids: Sequence[int], sampling: SamplingConfig, n: int, *_: Any
        ) -> list[Completion]:
            await self.held.wait()
            return await super().generate(prompt_ids, sampling, n)

    engine = Held(model)
    environment = make_environment("sums")
    run = asyncio.create_task(generate(environment, engine))

    def sessions() -> Any:
        return json.loads(environment.description["sessions"])

    await async_until(lambda: sessions()["policy"] == 4)
    assert sessions()["open"] == 4
    engine.held.set()
    _, groups = await run
    assert len(groups) == 1
    assert sessions()["open"] == 0
    assert "refused" not in sessions()


async def test_a_turn_beyond_the_bounds_is_refused_with_their_name_and_the_doctor_tells_of_it(model, monkeypatch):
    monkeypatch.setattr(inserting, "SECONDS_PER_LOOK", 0.1)
    config = GeneratorConfig(
        group_size=4, max_session_turns=1, max_concurrent_groups=1, on_prompt_error="skip", sampling=SAMPLING
    )
    environment = load_environment("verifiers:guesses", {"agent": HERE}, config)
    async with async_serving(EPOCH) as client:
        generator = RolloutGenerator(
            client, RecordedEngine(model), environment.prompts(0), config=config, rollout=environment
        )
        run = asyncio.create_task(generator.run())
        said = await said_by_doctor(client, "agents-refused")
        generator.stop()
        await run
    assert "with status 400" in said
    assert "the generator's max_session_turns is 1" in said


async def test_a_completion_that_no_policy_can_have_drawn_fails_its_rollout_with_that_sentence(model, caplog):
    class Breaking(RecordedEngine):
        async def generate(
            self, prompt_ids: Sequence[int], sampling: SamplingConfig, n: int, *_: Any
        ) -> list[Completion]:
            return [Completion([EOS], [7.0], "", "stop", [0]) for _ in range(n)]

    environment = make_environment("sums")
    generator = RolloutGenerator(
        RecordingClient(),
        Breaking(model),
        itertools.islice(environment.prompts(0), 1),
        config=GeneratorConfig(group_size=4, sampling=SAMPLING),
        rollout=environment,
    )
    await generator.run()
    assert generator.stats["groups_skipped"] == 1
    assert "log-probability 7: that of a drawn token is finite" in caplog.text


# ------------------------------------------------------------------------------------------------- the command


def test_replay_generate_plays_the_environment_of_the_page(model, tmp_path, monkeypatch):
    write_files(ROOT / "docs/how-to/agents.md", tmp_path)
    monkeypatch.chdir(tmp_path)
    command = ["generate", "--config", "generate.toml", "--model", str(model), "--engine", "transformers"]
    command += ["--group-size", "2", "--min-rollouts", "2", "--max-groups", "2", "--max-tokens", "4"]
    with ReplayServer(tables=[TableConfig(name="rollouts")], port=0) as server, ReplayClient(server.address) as client:
        # In this process: importing verifiers once more takes longer than all else.
        done = CliRunner().invoke(app, ["--address", server.address, *command])
        assert done.exit_code == 0, done.output
        items = client.list_items("rollouts").items
        groups = [item.group for item in client.get([item.key for item in items])]
    assert [item.tags["environment"] for item in items] == ["reversed_words"] * 2
    for group in groups:
        assert group.extras["rewards/rollout/right"].tolist() == group.rewards.tolist()
        assert "rewards/rollout/letters" in group.extras


# ---------------------------------------------------------------------------------------------------- learning


@pytest.mark.long
@pytest.mark.timeout(900)
def test_an_environment_of_two_turns_trains_for_fifty_steps(tmp_path):
    """The reward is the share of even digits in both turns: 5 of 24 characters at first."""
    folder = make_chat_model(tmp_path / "model", sharpness=1.0)
    rewards = {"even": {"fn": "guesses:even"}, "turns": {"weight": 0.0}}
    environment = make_environment("guesses", taskset={"task": {"rewards": rewards}})
    engine = TransformersEngine(folder, seed=0)
    sampling = SamplingConfig(max_tokens=4, seed=0)
    config = GeneratorConfig(group_size=8, sampling=sampling, max_concurrent_groups=None, stop_grace=0.2)
    tables = [TableConfig(name="rollouts", rate_limiter={"type": "queue", "max_size": 16})]
    server = ReplayServer(tables, port=0, admission={"fresh_groups_per_step": 4, "max_staleness": 2})
    with server, ReplayClient(server.address) as client:
        generator = in_thread(server.address, engine, environment, config)
        with generator:
            trainer = make_trainer(
                client,
                tmp_path / "run",
                model=AutoModelForCausalLM.from_pretrained(folder, dtype="float32"),
                max_steps=50,
                groups_per_step=4,
                learning_rate=3e-3,
                zero_variance="none",
            )
            trainer.train()
    curve = [line["fresh/reward_mean"] for line in lines_of(tmp_path / "run")]
    assert len(curve) == 50
    assert np.mean(curve[-10:]) > np.mean(curve[:10]) + 0.3


@contextmanager
def in_thread(address: str, engine: Any, environment: Any, config: GeneratorConfig) -> Iterator[None]:
    """A generator on an event loop of its own until the end of the block. Raises the error that ended it."""
    stop = threading.Event()

    async def run() -> None:
        async with AsyncReplayClient(address) as client:
            prompts = environment.prompts(0)
            generator = RolloutGenerator(client, engine, prompts, config=config, rollout=environment)
            running = asyncio.create_task(generator.run())
            while not (stop.is_set() or running.done()):
                await asyncio.sleep(0.05)
            generator.stop()
            await running

    generator = in_a_thread(asyncio.run, run())
    try:
        yield
    finally:
        stop.set()
        generator.result()

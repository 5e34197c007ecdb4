"""Tokens that the tokenizer has and the model lacks, and those that the model draws and the tokenizer lacks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
from tokenizers import decoders
from transformers import AutoTokenizer, BertGenerationTokenizer

from replay_generator import PromptError, WeightsMismatchError
from replay_generator.engines import Completion, EngineError, SamplingConfig, text_of
from replay_generator.engines.transformers import TransformersEngine
from replay_generator.engines.vllm_server import VLLMServerEngine
from replay_generator.groups.codec import PartialGroupSpec, encode_rollout
from replay_generator.prompts.prompt import Prompt
from replay_generator.rollouts.rollout import PlayedRollout, Rollout, RolloutPolicy, RolloutSequence, Task, single_turn
from replay_generator.rollouts.sessions.parsers import Parsers
from replay_generator.rollouts.sessions.session import Session
from replay_generator.rollouts.sessions.turns import Ask, Refusal
from replay_generator.rollouts.tool_loop import ToolCall, tool_loop
from replay_generator.testing import ScriptedEngine
from tests.generator.engines.vllm_servers import answering, answers_for, choice
from tests.generator.environments.test_tool_loop import chat_tokenizer
from tests.kit.clients import RecordingClient
from tests.kit.engines import SAID, check_completion, check_group
from tests.kit.generators import generate
from tests.kit.models import loaded
from tests.kit.prompts import EPOCH, PARTIAL_GROUPS, made, make_epoch
from tests.kit.servers import async_serving

SNOWMAN = "☃"
"""The text of a token that was added to a tokenizer, and not to the model."""
TURNS = SamplingConfig(max_tokens=6)


def extended_tokenizer() -> Any:
    tokenizer = chat_tokenizer()
    tokenizer.backend_tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens([SNOWMAN])
    return tokenizer


MODEL_SIZE = len(chat_tokenizer())
BAD = MODEL_SIZE
"""The token of the snowman."""


@dataclass
class Mortal(ScriptedEngine):
    """An engine that dies of a token that its model has no row for, as a real one does."""

    tokenizer: Any = field(default_factory=extended_tokenizer)
    vocabulary: int = MODEL_SIZE
    max_length: int = 1000
    completions: Sequence[Completion] = (SAID,)

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingConfig, n: int, *_: Any) -> list[Completion]:
        if max(prompt_ids) >= self.vocabulary or min(prompt_ids) < 0:
            raise EngineError(f"the engine died of {max(prompt_ids)}")
        return await super().generate(prompt_ids, sampling, n)


async def asks(task: Task, policy: RolloutPolicy) -> Rollout:
    sequence = RolloutSequence([*task.prompt_ids, BAD])
    sequence.append_completion(await policy.generate(sequence.token_ids))
    return Rollout([sequence])


async def asks_in_its_second_turn(task: Task, policy: RolloutPolicy) -> Rollout:
    sequence = RolloutSequence(task.prompt_ids)
    sequence.append_completion(await policy.generate(sequence.token_ids))
    sequence.append_observation([BAD])
    sequence.append_completion(await policy.generate(sequence.token_ids))
    return Rollout([sequence])


async def is_given_it_at_the_end(task: Task, policy: RolloutPolicy) -> Rollout:
    rollout = await single_turn(task, policy)
    rollout.sequences[0].append_observation([BAD])
    return rollout


def snow() -> str:
    """Tells the weather."""
    return SNOWMAN


calls_a_tool = tool_loop([snow], parse=lambda text: [ToolCall("snow", {})])


def asks_a_session(**ask: Any) -> Callable[[Task, RolloutPolicy], Awaitable[Rollout]]:
    async def play(task: Task, policy: RolloutPolicy) -> Rollout:
        session = Session(task, policy, Parsers())
        session.delivered(await session.ask(Ask(**ask), b"1"))
        return session.rollout()

    return play


async def goes_on_in_a_session(task: Task, policy: RolloutPolicy) -> Rollout:
    session = Session(task, policy, Parsers())
    first = [{"role": "user", "content": "2+3?"}]
    answer = await session.ask(Ask(first), b"1")
    session.delivered(answer)
    said = {"role": "assistant", "content": answer.text}
    session.delivered(await session.ask(Ask([*first, said, {"role": "user", "content": SNOWMAN}]), b"2"))
    return session.rollout()


CHAT = [{"role": "user", "content": "2+3?"}]
SNOWY = [{"role": "user", "content": f"2+{SNOWMAN}?"}]
DOORS: dict[str, tuple[Any, Any]] = {
    "a text": (f"2+{SNOWMAN}", single_turn),
    "a chat": (SNOWY, single_turn),
    "a hook asks": (CHAT, asks),
    "a hook asks in its second turn": (CHAT, asks_in_its_second_turn),
    "a hook gives it at the end": (CHAT, is_given_it_at_the_end),
    "a tool": (CHAT, calls_a_tool),
    "a session, by messages": (CHAT, asks_a_session(messages=SNOWY)),
    "a session, in its second turn": (CHAT, goes_on_in_a_session),
    "a session, by a text": (CHAT, asks_a_session(prompt=f"2+{SNOWMAN}")),
    "a session, by tokens": (CHAT, asks_a_session(prompt=[5, BAD])),
}
"""By the way that the token takes: a prompt, and the hook that plays it."""


@pytest.mark.parametrize("token", [BAD, BAD + 7, -1, 2**40])
@pytest.mark.parametrize("hook", [asks, is_given_it_at_the_end])
async def test_a_hook_with_a_token_that_no_model_has_loses_its_rollout_alone(hook, token, monkeypatch):
    monkeypatch.setitem(hook.__globals__, "BAD", token)

    async def play(task: Task, policy: RolloutPolicy) -> Rollout:
        return await (single_turn if task.index else hook)(task, policy)

    client = RecordingClient()
    stats = await generate(client, Mortal(), play, prompts=[{"prompt": CHAT}], min_rollouts=3)
    assert client.inserts[0][0].group_size == 3
    assert stats["rollouts_failed"] == 1


@pytest.mark.parametrize(("prompt", "hook"), DOORS.values(), ids=DOORS)
async def test_a_token_that_the_model_lacks_is_left_to_on_prompt_error_and_kills_no_engine(prompt, hook):
    async def play(task: Task, policy: RolloutPolicy) -> Rollout:
        return await (single_turn if task.prompt_id == "fine" else hook)(task, policy)

    prompts = [{"prompt": prompt, "prompt_id": "snowy"}, {"prompt": CHAT, "prompt_id": "fine"}]
    client = RecordingClient()
    stats = await generate(client, Mortal(), play, prompts=prompts, max_groups=None, on_prompt_error="skip")
    assert [group.prompt_id for group, _ in client.inserts] == ["fine"]
    assert stats["groups_skipped"] == 1
    says = f"the token {BAD}, and the model has the tokens 0 to {BAD - 1}: its tokenizer was extended, so resize"
    with pytest.raises(PromptError, match=f"'snowy'.*{says}"):
        await generate(RecordingClient(), Mortal(), play, prompts=prompts, max_groups=None)


@pytest.mark.parametrize(
    "ask", [{"messages": SNOWY}, {"prompt": f"2+{SNOWMAN}"}, {"prompt": [5, BAD]}, {"prompt": [-1]}]
)
async def test_a_session_refuses_it_with_a_status_at_which_no_client_tries_again(ask):
    engine = Mortal()
    task = Task("p", [5], {}, None, 0, TURNS, engine.tokenizer, engine.max_length)
    session = Session(task, RolloutPolicy(engine, task.sampling, []), Parsers())
    with pytest.raises(Refusal, match=r"has the tokens 0 to|tokens are 0 or above") as raised:
        await session.ask(Ask(**ask), b"1")
    assert raised.value.status == 400


@pytest.mark.parametrize("partial_groups", [None, "partial_groups"])
async def test_a_prompt_of_a_table_that_the_model_lacks_a_token_for_is_rejected_by_each_generator(partial_groups):
    rows = [{"prompt": f"{number}+{SNOWMAN * (number == 3)}", "prompt_id": f"p{number}"} for number in range(6)]
    async with async_serving([*EPOCH, PARTIAL_GROUPS]) as client:
        for epochs in (1, 2):  # the second generator draws it again, as one that starts after a death would
            generator = make_epoch(
                client, rows, engine=Mortal(), partial_groups_table=partial_groups, prompts_epochs=epochs
            )
            await generator.run()
            assert generator.stats["items_rejected"] == 1
        assert sorted(await made(client)) == sorted(["p0", "p1", "p2", "p4", "p5"] * 2)


@pytest.mark.parametrize("where", ["its prompt", "a rollout"])
async def test_a_group_that_a_generator_of_another_model_began_is_rejected(where, caplog):
    prompt = Prompt("other", "1+1=", {"prompt": "1+1="})
    spec = PartialGroupSpec(1, prompt, [5, BAD] if where == "its prompt" else [5, 6], 0, 3, SamplingConfig())
    sequence = RolloutSequence(spec.prompt_ids)
    sequence.append_completion(Completion([7, BAD], [-0.1, -0.2], "7", "stop", [0, 0]))
    async with async_serving([*EPOCH, PARTIAL_GROUPS]) as client:
        key = await client.insert(spec.encode(), {"partial_groups": 1.0})
        if where == "a rollout":
            column = encode_rollout(PlayedRollout.of(Rollout([sequence])))
            await client.extend(key, {"rollout/0": column}, axes={"rollout/0": "group"})
        generator = make_epoch(client, 2, engine=Mortal(), partial_groups_table="partial_groups")
        await generator.run()
        assert sorted(await made(client)) == ["p0", "p1"]
        assert generator.stats["items_rejected"] == 1
    assert f"has the token {BAD}, and the model has the tokens 0 to {BAD - 1}" in caplog.text


async def test_weights_whose_probe_has_a_token_that_the_model_lacks_are_refused_before_they_are_loaded(tmp_path):
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1/probe.json").write_text(json.dumps({"token_ids": [3, BAD], "logprobs": [-0.5]}))
    client, engine = RecordingClient(), Mortal(probe_scores=[-0.5])
    await client.publish(1, tmp_path / "step-1")
    with pytest.raises(WeightsMismatchError, match=f"policy 1: .*step-1/probe.json has the token {BAD}, and the model"):
        await generate(client, engine, single_turn)
    assert engine.loaded == []


# ------------------------------------------------------------------------------------------- real engines


def with_tokenizer(model: Path, folder: Path, *, added: Sequence[str] = (), rows: int = 0) -> Path:
    """A copy of a model. Its tokenizer has more tokens, or its embedding more rows, which the model draws often."""
    shutil.copytree(model, folder)
    if added:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.add_tokens(list(added))
        tokenizer.save_pretrained(folder)
    if rows:
        larger = loaded(folder)
        size = len(larger.get_input_embeddings().weight)
        larger.resize_token_embeddings(rows, mean_resizing=False)
        with torch.no_grad():
            torch.manual_seed(3)
            larger.get_input_embeddings().weight[size:].normal_(0, 1)
            larger.get_output_embeddings().weight[size:].normal_(0, 1)
        larger.save_pretrained(folder)
    return folder


async def test_the_transformers_engine_lives_on_after_a_prompt_with_a_token_that_its_embedding_lacks(model, tmp_path):
    folder = with_tokenizer(model, tmp_path / "extended", added=[SNOWMAN])
    engine = TransformersEngine(folder, seed=0)
    prompts = [{"prompt": f"1+{SNOWMAN}=", "prompt_id": "snowy"}, {"prompt": "1+1=", "prompt_id": "fine"}]
    client = RecordingClient()
    options: dict[str, Any] = {"max_groups": None, "on_prompt_error": "skip", "sampling": TURNS}
    stats = await generate(client, engine, single_turn, prompts=prompts, **options)
    assert [group.prompt_id for group, _ in client.inserts] == ["fine"]
    assert stats["groups_skipped"] == 1


async def two_turns(task: Task, policy: RolloutPolicy) -> Rollout:
    sequence = RolloutSequence(task.prompt_ids)
    sequence.append_completion(await policy.generate(sequence.token_ids))
    sequence.append_observation(task.tokenizer.encode("+"))
    sequence.append_completion(await policy.generate(sequence.token_ids))
    return Rollout([sequence])


async def two_texts_of_a_session(task: Task, policy: RolloutPolicy) -> Rollout:
    session = Session(task, policy, Parsers())
    answer = await session.ask(Ask(prompt="12+3="), b"1")
    session.delivered(answer)
    session.delivered(await session.ask(Ask(prompt=f"12+3={answer.text}+"), b"2"))
    return session.rollout()


@pytest.mark.parametrize("hook", [two_turns, two_texts_of_a_session])
async def test_a_model_goes_on_after_tokens_that_it_drew_and_its_tokenizer_lacks(model, tmp_path, hook):
    folder = with_tokenizer(model, tmp_path / "padded", rows=64)
    engine = TransformersEngine(folder, seed=0)
    client = RecordingClient()
    await generate(client, engine, hook, prompts=["12+3="], sampling=TURNS)
    group = client.inserts[0][0]
    assert group.group_size == 4
    assert group.completion_ids.max() >= len(engine.tokenizer)
    assert all(len(turns) == 4 for turns in group.meta["turns"])
    check_group(group, TURNS, folder)


@pytest.fixture(scope="module")
def slow_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One of sentencepiece, which raises an error of its own for a token that it does not have."""
    folder = tmp_path_factory.mktemp("sentencepiece")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["one two three four five six seven eight nine ten"] * 20),
        model_prefix=str(folder / "spiece"),
        vocab_size=23,
        minloglevel=2,
    )
    return BertGenerationTokenizer(str(folder / "spiece.model"))


class Closed:
    """A tokenizer of somebody's own, which tells nothing."""

    def decode(self, token_ids: Sequence[int]) -> str:
        raise KeyError(token_ids[-1])


def test_what_a_token_that_only_pads_the_embedding_reads_is_nothing(model, slow_tokenizer):
    fast = AutoTokenizer.from_pretrained(model)
    assert text_of(fast, [3, 60, 4]) == "01"
    assert text_of(fast, [3, 4]) == "01"
    with pytest.raises(IndexError):
        slow_tokenizer.decode([5, 60, 6])
    assert text_of(slow_tokenizer, [5, 60, 6]) == text_of(slow_tokenizer, [5, 6]) != ""
    assert text_of(slow_tokenizer, [60]) == ""
    with pytest.raises(KeyError):  # one that does not tell what it knows
        text_of(Closed(), [5, 60])


async def test_an_engine_writes_what_a_slow_tokenizer_knows_of_a_completion(model, tmp_path, slow_tokenizer):
    folder = with_tokenizer(model, tmp_path / "padded", rows=64)
    engine = TransformersEngine(folder, seed=0)
    engine.tokenizer = slow_tokenizer
    completions = await engine.generate([3, 9], TURNS, 4)
    await engine.close()
    assert max(token for each in completions for token in each.token_ids) >= len(slow_tokenizer)
    for completion in completions:
        assert completion.text == text_of(slow_tokenizer, completion.token_ids, skip_special_tokens=True)
        check_completion(completion, [3, 9], TURNS, folder)


def unknown_to_transformers(folder: Path) -> Path:
    """Lets the configuration be of a type whose code would have to come with the model."""
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = "somebodys"
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("ours", [False, True])
async def test_a_servers_vocabulary_is_that_of_its_models_configuration_whoever_wrote_its_code(model, tmp_path, ours):
    folder = with_tokenizer(model, tmp_path / "model", added=[SNOWMAN, "☂"])
    info = {"vllm_config": {"model_config": {"logprobs_mode": "processed_logprobs", "max_logprobs": 1000}}}
    logprobs = {"token_logprobs": [-1.0], "top_logprobs": [{"token_id:5": -1.0}]}
    drawn = {"choices": [choice(logprobs=logprobs)]}
    answers = answers_for(folder) | {"/server_info": info, "/v1/completions": drawn}
    if not ours:
        unknown_to_transformers(folder)
    bodies: list[dict[str, Any]] = []
    with answering(answers, bodies) as (url, _):
        engine = VLLMServerEngine(folder, base_url=url, self_test=False, served_model="model")
        assert engine.vocabulary == 27 < len(engine.tokenizer)
        await engine.generate([3, 9], SamplingConfig(max_tokens=4, top_k=5), 1)
        await engine.close()
    # vLLM dies of a request for the log-probabilities of more tokens than the model has.
    assert [body["logprobs"] for body in bodies if "logprobs" in body] == [27]


@pytest.mark.vllm
@pytest.mark.long
@pytest.mark.timeout(600)
async def test_vllm_takes_what_its_model_has_and_is_not_asked_for_more(model, tmp_path):
    vllm_engine = pytest.importorskip("replay_generator.engines.vllm").VLLMEngine
    folder = with_tokenizer(model, tmp_path / "model", rows=64, added=[f"<{number}>" for number in range(60)])
    engine = vllm_engine(folder, seed=0)
    assert engine.vocabulary == 64 < len(engine.tokenizer)
    client = RecordingClient()
    prompts = [{"prompt": "1+<59>=", "prompt_id": "snowy"}, {"prompt": "1+1=<30>", "prompt_id": "fine"}]
    options: dict[str, Any] = {"max_groups": None, "on_prompt_error": "skip", "sampling": TURNS}
    stats = await generate(client, engine, two_turns, prompts=prompts, **options)
    assert stats["groups_skipped"] == 1
    (group,) = [group for group, _ in client.inserts]
    assert group.prompt_id == "fine"
    assert group.prompt_ids.max() == 57
    check_group(group, TURNS, folder)

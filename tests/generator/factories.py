"""Small models, probes and a client that records, for the tests of the generator and its engines."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from replay_client.columns import OFFSETS, RAGGED
from replay_client.records import AdmissionInfo, PermitGrant, Policy, Sample
from replay_client.rollout import RolloutGroup
from replay_client.sampling_masks import SAMPLING_MASK
from replay_generator import GeneratorConfig, RolloutGenerator
from replay_generator.engines import Completion, Engine, EngineError, SamplingConfig
from replay_generator.engines.transformers import TransformersEngine
from replay_generator.prompts.prompt import Prompt

CHARACTERS = "0123456789+=? abcdefghij"
EOS = 1
EXACT = 1e-4
"""Nats. On the models that are made here float32 is at most 1e-5 off float64. A token with the weights of another
version is off by some tenths and more in the median."""


def make_model(folder: Path, *, seed: int = 0, tied: bool = False, sharpness: float = 8.0) -> Path:
    """A Qwen2 of some 20,000 parameters with a character tokenizer, saved as `transformers` does.

    `sharpness` scales the output head, so that its distributions are far from uniform.
    """
    vocabulary = {"<pad>": 0, "<eos>": EOS, "<unk>": 2}
    vocabulary |= {character: index for index, character in enumerate(CHARACTERS, start=len(vocabulary))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(""), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder)
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        pad_token_id=0,
        eos_token_id=EOS,
        bos_token_id=None,
    )
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(sharpness)
    model.save_pretrained(folder)
    return folder


def scores(folder: Path, token_ids: Sequence[int]) -> list[float]:
    """What transformers says: log-probabilities at temperature 1 of all tokens but the first."""
    return recomputed(folder, token_ids[:1], token_ids[1:], SamplingConfig())


def recomputed(
    folder: Path, prompt_ids: Sequence[int], completion_ids: Sequence[int], sampling: SamplingConfig
) -> list[float]:
    """Log-probabilities of a completion by one forward pass, without cache, padding or batch."""
    return logprobs_of(loaded(folder), prompt_ids, completion_ids, sampling)


def loaded(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()


def logprobs_of(
    model: Any, prompt_ids: Sequence[int], completion_ids: Sequence[int], sampling: SamplingConfig
) -> list[float]:
    """`recomputed` with a model that is loaded."""
    logprobs_TV = distributions(model, prompt_ids, completion_ids, sampling)
    return [logprobs_TV[step, token].item() for step, token in enumerate(completion_ids)]


def distributions(
    model: Any, prompt_ids: Sequence[int], completion_ids: Sequence[int], sampling: SamplingConfig
) -> torch.Tensor:
    """(T, V) log-probabilities that each token of a completion is drawn with."""
    ids = torch.tensor([[*prompt_ids, *completion_ids]])
    with torch.no_grad():
        logits_TV = model(ids).logits[0, len(prompt_ids) - 1 : -1] / sampling.temperature
    for row in logits_TV:
        _restrict(row, sampling)
    return logits_TV.log_softmax(-1)


def check_masks(completion: Completion, prompt_ids: Sequence[int], sampling: SamplingConfig, weights: Path) -> None:
    """As `check_completion`, and it names the tokens that were kept for each token, if they are not too many."""
    check_completion(completion, prompt_ids, sampling, weights)
    logprobs_TV = distributions(loaded(weights), prompt_ids, completion.token_ids, sampling)
    kept = [row.isfinite().nonzero()[:, 0].tolist() for row in logprobs_TV]
    ids, offsets = completion.extras[SAMPLING_MASK], completion.extras[SAMPLING_MASK + OFFSETS]
    assert completion.axes[SAMPLING_MASK] == RAGGED
    assert (ids.dtype, offsets.dtype) == (np.int32, np.int32)
    found = [sorted(ids[start:end].tolist()) for start, end in pairwise(offsets)]
    assert found == [row if len(row) <= sampling.sampling_masks else [] for row in kept]


def _restrict(logits_V: torch.Tensor, sampling: SamplingConfig) -> None:
    """Leave out what min_p, then top_k and then top_p leave out, token by token as their definitions read."""
    ranked = logits_V.argsort(descending=True).tolist()
    likely = logits_V.softmax(-1).tolist()
    for token in ranked:
        if likely[token] < sampling.min_p * likely[ranked[0]]:
            logits_V[token] = -torch.inf
    if sampling.top_k:
        logits_V[ranked[sampling.top_k :]] = -torch.inf
    reached, probabilities = 0.0, logits_V.softmax(-1).tolist()
    for token in ranked:
        if sampling.top_p < 1 and reached >= sampling.top_p:
            logits_V[token] = -torch.inf
        reached += probabilities[token]


def check_completion(
    completion: Completion, prompt_ids: Sequence[int], sampling: SamplingConfig, weights: Path | Mapping[int, Path]
) -> None:
    """Each token has the log-probability that the weights of its version give it after all tokens before it.

    `weights` is one folder, or that of each version.
    """
    versions = completion.policy_versions
    assert versions == sorted(versions)
    assert len(versions) == len(completion.token_ids)
    folders = weights if isinstance(weights, Mapping) else dict.fromkeys(versions, weights)
    by_version = {each: recomputed(folders[each], prompt_ids, completion.token_ids, sampling) for each in {*versions}}
    expected = [by_version[version][step] for step, version in enumerate(versions)]
    np.testing.assert_allclose(completion.logprobs, expected, atol=EXACT)


def check_group(group: RolloutGroup, sampling: SamplingConfig, weights: Path | Mapping[int, Path]) -> None:
    """Each token of the policy has the log-probability that the weights of its version give it after all tokens before
    it, whoever wrote those; and each token that it did not write has none. Turns may come from several versions."""
    versions_T = group.extras.get("policy_versions", np.full(group.num_tokens, group.policy_version))
    folders = weights if isinstance(weights, Mapping) else dict.fromkeys(versions_T.tolist(), weights)
    models = {version: loaded(folders[version]) for version in {*versions_T.tolist()}}
    for prompt, span, sampled in zip(group.prompts(), group.sequence_spans(), group.sampled_spans(), strict=True):
        ids, trained = group.completion_ids[sampled], group.trained_mask[sampled]
        versions, logprobs = versions_T[sampled], group.rollout_logprobs[sampled]
        assert (np.diff(versions) >= 0).all()
        assert np.isnan(logprobs[~trained]).all()
        assert not group.trained_mask[span.start : sampled.start].any()
        for version in {*versions[trained].tolist()}:
            expected = np.array(logprobs_of(models[version], prompt.tolist(), ids.tolist(), sampling))
            chosen = trained & (versions == version)
            np.testing.assert_allclose(logprobs[chosen], expected[chosen], atol=EXACT)


async def check_scores(engine: Engine, weights: Path, token_ids: Sequence[int] = (3, 9, 4, 13, 5)) -> None:
    """The engine scores tokens as transformers does with these weights."""
    np.testing.assert_allclose(await engine.score(list(token_ids)), scores(weights, token_ids), atol=EXACT)


def make_version(
    base: Path, folder: Path, *, seed: int = 1, probe: bool = True, probe_error: float = 0.0, drift: float = 0.05
) -> Path:
    """Weights some way off those of `base`, with the probe that a trainer would write (off by `probe_error` nats)."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype="float32")
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * drift)
    model.save_pretrained(folder)
    if probe:
        token_ids = [3, 9, 4, 13, 7, 5, 20, 11]
        logprobs = [logprob + probe_error for logprob in scores(folder, token_ids)]
        (folder / "probe.json").write_text(json.dumps({"token_ids": token_ids, "logprobs": logprobs}))
    return folder


def make_adapter(
    base: Path, folder: Path, *, seed: int = 1, probe: bool = True, rank: int = 4, drift: float = 0.1
) -> Path:
    """A LoRA adapter of `base` with random weights, and the probe that a trainer would write.

    With a `drift` of 0.1 the median token is 1.5 nats off the base model, and float32 is at most 1e-5 nats off float64.
    With 0.3 attention is so sharp that float32 itself is up to 1e-3 nats off, which no comparison tells from a fault.
    """
    from peft import LoraConfig, get_peft_model

    model = AutoModelForCausalLM.from_pretrained(base, dtype="float32")
    torch.manual_seed(seed)
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, drift)
    adapted.save_pretrained(folder)
    if probe:
        token_ids = [3, 9, 4, 13, 7, 5, 20, 11]
        (folder / "probe.json").write_text(json.dumps({"token_ids": token_ids, "logprobs": scores(folder, token_ids)}))
    return folder


def make_prompts(count: int = 10_000, *, text: str = "{}+1=") -> list[Prompt]:
    return [Prompt.of({"prompt": text.format(index), "prompt_id": f"p{index}"}) for index in range(count)]


@dataclass
class RecordingClient:
    """Stands where an AsyncReplayClient does, and remembers what it was asked."""

    admission: bool = False
    inserts: list[tuple[RolloutGroup, dict[str, float]]] = field(default_factory=list)
    leases: list[PermitGrant] = field(default_factory=list)
    """Granted, and neither used nor released."""
    granted: int = 0
    released: int = 0
    refuse: list[Exception] = field(default_factory=list)
    """Raised by the next inserts, one each."""
    left: bool = False
    """It said that it ends."""
    insert_keys: list[int] = field(default_factory=list)
    settings: Mapping[str, str] = field(default_factory=dict)
    """What it was told to describe itself with."""
    current: Policy = field(default_factory=Policy)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def publish(self, version: int, weights: Path | str) -> None:
        async with self.changed:
            self.current = Policy(version=version, weights=str(weights))
            self.changed.notify_all()

    async def inserted(self, count: int) -> None:
        async with self.changed:
            await self.changed.wait_for(lambda: len(self.inserts) >= count)

    async def insert(
        self,
        group: RolloutGroup,
        priorities: Mapping[str, float],
        *,
        key: int,
        permits: PermitGrant | None,
        timeout: float | None,
        tags: Mapping[str, str | int],
        closes: Sequence[Sample],
    ) -> int:
        await asyncio.sleep(0)
        self.insert_keys.append(key)
        if self.refuse:
            raise self.refuse.pop(0)
        if permits is not None:
            self.leases.remove(permits)
        async with self.changed:
            self.inserts.append((group, dict(priorities)))
            self.changed.notify_all()
        return key

    async def policy(self) -> Policy:
        return self.current

    async def watch_policy(self) -> AsyncIterator[Policy]:
        yield (last := self.current)
        while True:
            async with self.changed:
                while self.current == last:
                    await self.changed.wait()
                last = self.current
            yield last

    async def server_info(self, *, timeout: float | None = None) -> Any:
        admission = AdmissionInfo(table="rollouts") if self.admission else None
        return SimpleNamespace(admission=admission, policy=self.current, server_id=1, tables={})

    async def describe(self, settings: Mapping[str, str], *, timeout: float | None = None) -> None:
        self.settings = dict(settings)

    async def acquire_permits(self, count: int, *, timeout: float | None) -> PermitGrant:
        self.granted += count
        self.leases.append(PermitGrant(self.granted, count, 600.0))
        return self.leases[-1]

    async def release_permits(self, grant: PermitGrant) -> int:
        self.leases.remove(grant)
        self.released += grant.count
        return grant.count

    async def leave(self, *, timeout: float) -> None:
        self.left = True

    async def __aenter__(self) -> RecordingClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass


class Letters:
    """A tokenizer with a token a character."""

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]


@dataclass
class ScriptedEngine:
    """An engine whose completions are made up; `hold` keeps generations from ending."""

    tokenizer: Any = field(default_factory=Letters)
    max_length: int = 64
    model: str | None = None
    completions: Sequence[Completion] = (
        Completion([7, 8, EOS], [-0.1, -0.2, -0.3], "78", "stop", []),
        Completion([], [], "", "abort", []),
        Completion([9], [float("nan")], "9", "length", []),
    )
    hold: asyncio.Event | None = None
    generating: int = 0
    most_generating: int = 0
    seeds: list[int | None] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    version: int = 0
    generating_at_load: list[int] = field(default_factory=list)
    probe_scores: list[float] = field(default_factory=list)
    closed: int = 0

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingConfig, n: int, *_: Any) -> list[Completion]:
        version = self.version
        self.generating += 1
        self.most_generating = max(self.most_generating, self.generating)
        self.seeds.append(sampling.seed)
        try:
            await asyncio.sleep(0)
            if self.hold is not None:
                await self.hold.wait()
        finally:
            self.generating -= 1
        drawn = [self.completions[index % len(self.completions)] for index in range(n)]
        return [replace(each, policy_versions=[version] * len(each.token_ids)) for each in drawn]

    def let_go(self) -> None:
        """Ends the generations that `hold` keeps, and keeps no other."""
        assert self.hold is not None
        self.hold.set()

    async def load_weights(self, path: str, version: int) -> None:
        if not Path(path).is_dir():
            raise FileNotFoundError(f"no *.safetensors in {path}")
        self.generating_at_load.append(self.generating)
        await asyncio.sleep(0)
        self.loaded.append(path)
        self.version = version

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        return self.probe_scores

    async def close(self) -> None:
        self.closed += 1


async def check_each_is_told(engine: Any, sampling: SamplingConfig) -> None:
    """Every completion is told before the request is answered, and some while others are still drawn.

    A busy machine may tell all at once, but hardly each time.
    """
    for _ in range(20):
        told: dict[int, Completion] = {}
        one = asyncio.Event()

        def finished(number: int, completion: Completion, told: Any = told, one: asyncio.Event = one) -> None:
            assert number not in told
            told[number] = completion
            one.set()

        request = asyncio.create_task(engine.generate([3, 9], sampling, 24, finished))
        await one.wait()
        early = not request.done() and len(told) < 24
        completions = await request
        assert told == dict(enumerate(completions))
        if early:
            return
    raise AssertionError("no completion was told before all had ended")


SAID = Completion([7, 8], [-0.1, -0.2], "78", "stop", [])
"""The completion that engines return in tests where its tokens do not matter."""


def zero(row: Any, text: str) -> float:
    return 0.0


async def generate(
    client: Any, engine: Any, hook: Any, *, reward: Any = zero, prompts: Any = None, **config: Any
) -> Any:
    config = {"group_size": 4, "max_groups": 1, "max_concurrent_groups": 1} | config
    prompts = make_prompts() if prompts is None else prompts
    generator = RolloutGenerator(client, engine, prompts, reward, GeneratorConfig(**config), rollout=hook)
    await generator.run()
    return generator.stats


async def played(hook: Any, engine: Any = None, **config: Any) -> RolloutGroup:
    """The group that a hook makes of one prompt. Where there is none, it raises why."""
    client = RecordingClient()
    config = {"on_prompt_error": "raise"} | config
    await generate(client, ScriptedEngine(completions=[SAID]) if engine is None else engine, hook, **config)
    return client.inserts[0][0]


class RecordedEngine(TransformersEngine):
    """Remembers what it was asked for, and what it drew."""

    fails_after: int | None = None

    def __init__(self, model: Path) -> None:
        super().__init__(model, seed=0)
        self.drawn: list[tuple[list[int], Completion]] = []

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingConfig, n: int, *_: Any) -> list[Completion]:
        if self.fails_after is not None and len(self.drawn) >= self.fails_after:
            raise EngineError("the engine is gone")
        completions = await super().generate(prompt_ids, sampling, n)
        self.drawn += [(list(prompt_ids), completion) for completion in completions]
        return completions


def parts(group: RolloutGroup) -> Iterator[tuple[list[int], Completion]]:
    """Each stretch of tokens that the policy wrote, with all tokens before it, as the group has them."""
    versions = group.extras.get("policy_versions", np.full(group.num_tokens, group.policy_version))
    for ids, span in zip(group.completions(), group.sequence_spans(), strict=True):
        for drawn, at in itertools.groupby(range(len(ids)), lambda at, span=span: bool(group.trained_mask[span][at])):
            place = list(at)
            logprobs = group.rollout_logprobs[span][place]
            if not drawn:
                assert np.isnan(logprobs).all()
                continue
            before = [*group.prompt_ids.tolist(), *ids[: place[0]].tolist()]
            yield before, Completion(ids[place].tolist(), logprobs.tolist(), "", "", versions[span][place].tolist())


def assert_drawn(groups: Sequence[RolloutGroup], engine: Any) -> None:
    """Every completion that `engine.drawn` has is in the groups once, after the tokens that it was asked with,
    unchanged."""

    def told(before: Sequence[int], part: Completion) -> tuple[Any, ...]:
        return list(before), part.token_ids, np.float32(part.logprobs).tolist(), part.policy_versions

    left = [told(*each) for each in engine.drawn]
    for group in groups:
        for before, part in parts(group):
            left.remove(told(before, part))
    assert left == []


def make_chat_tokenizer(template: str | None, *, bos: bool = False) -> PreTrainedTokenizerFast:
    """A tokenizer with a token a byte, and one for each mark that chat templates write; `bos`: it writes <s> first."""
    marks = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({name: at for at, name in enumerate([*marks[:4], *letters])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 0)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", additional_special_tokens=marks[2:4]
    )
    fast.chat_template = template
    return fast


def shipped_template(name: str) -> str:
    """The chat template of a model, as TRL ships it."""
    trl = pytest.importorskip("trl")
    return (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text()

"""VerifiersEnvironment: an environment of the package `verifiers` as a source of rollouts.

    tasks of the environment ──▶ prompts
    episode of a task ──chat──▶ `verifiers` makes token ids of it ──ids──▶ SessionServer: Session ──▶ RolloutPolicy
         └──traces──▶ branches ──▶ sequences of the session; rewards ──▶ the reward

An episode of `verifiers` has a trace for each agent. A trace is a tree of messages, each with the tokens that it added.
Every path from the root to a leaf is a branch: the conversation of some request to the policy. Each branch of an agent
that is trained becomes a sequence. The sequences are made of the exchanges of the session (sessions/exchanges.py). The
last exchange of a branch is the one whose tokens, with those of all exchanges before it, are the tokens of the branch.

The client of `verifiers`, TrainClient, sends requests of vLLM's `/inference/v1/generate`: a request has token ids, and
an answer has token ids and log-probabilities. An answer has no field for policy versions and extras. Therefore the
trainer gets the completions that the session has stored, and not those in the traces.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import numpy as np
from aiohttp import web
from pydantic import ValidationError

try:
    import renderers.client
    import verifiers.v1 as vf
    from renderers.base import MODEL_RENDERER_MAP
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config
except ImportError as missing:
    raise ImportError(f"an environment of verifiers needs the package verifiers 0.4: {missing}") from missing

from replay_client.sampling_masks import TRUNCATING
from replay_generator.config import GeneratorConfig
from replay_generator.engines import Completion
from replay_generator.prompts.prompt import Prompt, cycle_prompts
from replay_generator.rollouts.environments.template_renderer import DAY
from replay_generator.rollouts.rollout import Rollout, RolloutError, RolloutPolicy, Task
from replay_generator.rollouts.sessions.dialects.chat import Chat
from replay_generator.rollouts.sessions.dialects.fields import MODEL
from replay_generator.rollouts.sessions.endpoint import Dialect, SessionServer, parsed
from replay_generator.rollouts.sessions.exchanges import Exchange
from replay_generator.rollouts.sessions.large_requests import worked
from replay_generator.rollouts.sessions.parsers import Parsers
from replay_generator.rollouts.sessions.session import Session
from replay_generator.rollouts.sessions.turns import Ask, Refusal
from replay_protos.settings import explain

_TEMPLATE_RENDERER = "replay_generator.rollouts.environments.template_renderer.TemplateRenderer"
"""The path by which `renderers` imports TemplateRenderer."""
_PATH = "/inference/v1/generate"
"""The path at which `verifiers` asks for completions. This path is vLLM's."""
_TRACE_HEADER = "X-Session-ID"
"""The header in which `verifiers` names the trace that a request belongs to."""


class EpisodeSession(Session):
    """The session of an episode. The session remembers which traces have asked the policy for a completion."""

    def __init__(self, task: Task, policy: RolloutPolicy, config: GeneratorConfig) -> None:
        super().__init__(
            task,
            policy,
            Parsers(),  # parses nothing: `verifiers` itself divides the turns into thoughts, text and calls
            most_turns=config.max_session_turns,
            most_bytes=config.max_session_bytes,
        )
        self.trace_ids: set[str] = set()
        """The ids of the traces for which a completion was requested, from _TRACE_HEADER of the requests."""


class VerifiersEnvironment(SessionServer):
    """A rollout hook that plays an episode for each rollout. Its `prompts` are the tasks of the environment."""

    def __init__(self, name: str, args: Mapping[str, Any] | None = None, config: GeneratorConfig | None = None) -> None:
        """`name`: the name by which `verifiers` finds the taskset. `args`: the fields of the EnvConfig of `verifiers`.
        One more field is allowed: `renderer`, an object with the fields of a RendererConfig. `config`: the settings of
        the generator, which limit the turns and bytes of a rollout; None: the defaults. Raises ValueError if the
        environment cannot be loaded."""
        # A refusal at _PATH has the form of Chat's errors, which TrainClient reads.
        super().__init__(posted=((_PATH, Chat(), _generate),))
        self._config = config or GeneratorConfig()
        env_fields = dict(args or {})
        self._renderer = env_fields.pop("renderer", None) or {}
        """The fields of a RendererConfig that the user gave, by name. Empty: the user gave none."""
        self._name = name
        taskset = env_fields.get("taskset") or {}
        try:
            if not isinstance(taskset, Mapping):
                raise ValueError(f"taskset must be an object, not {taskset!r}")
            if not isinstance(self._renderer, Mapping):
                raise ValueError(f"renderer must be an object, not {self._renderer!r}")
            # This object is made only for its checks: it raises a ValueError for fields that cannot be used.
            vf.TrainClientConfig(renderer=self._renderer_of(""))
            env_fields["taskset"] = {**taskset, "id": name}
            self._env: Any = load_environment(resolve_env_config(env_fields))
        except ModuleNotFoundError as error:
            raise ValueError(f"environment 'verifiers:{name}': {_missing(error)}") from error
        except ValueError as error:
            raise ValueError(f"environment 'verifiers:{name}': {_in_one_line(error)}") from error
        except Exception as error:  # a module of the user's own, which may raise anything
            raise ValueError(f"environment 'verifiers:{name}': {type(error).__name__}: {error}") from error
        self._held = AsyncExitStack()
        """Holds the HTTP server and the environment while this context is entered. `__aexit__` ends both."""

    def prompts(self, seed: int = 0) -> Iterator[Prompt]:
        """A prompt for each task, without end, shuffled anew for each epoch. An endless taskset keeps its own order.

        Raises ValueError if the tasks cannot be loaded, or if there are none.
        """
        taskset = self._env.taskset
        if not taskset.bounded:  # endless, so it cannot be listed or shuffled
            return map(_prompt, taskset)
        try:
            prompts = [_prompt(task) for task in taskset]
        except Exception as error:  # the taskset may read files, or ask a hub
            raise ValueError(
                f"environment 'verifiers:{self._name}' cannot load its tasks: {type(error).__name__}: {error}"
            ) from error
        if not prompts:
            raise ValueError(f"environment 'verifiers:{self._name}' has no tasks")
        return cycle_prompts(prompts, seed=seed)

    async def __aenter__(self) -> VerifiersEnvironment:
        """Starts the HTTP server and the resources of the environment."""
        # `renderers` 0.1 has one lock for the whole process, and the first event loop that waits for the lock owns it.
        # Without a new lock, a second run in the same process, with another event loop, would fail.
        renderers.client._max_prompt_len_lock = asyncio.Lock()
        async with AsyncExitStack() as held:  # ends the server if the environment cannot be entered
            await super().__aenter__()
            # The stack calls the first exit last, so the server ends after the environment.
            held.push_async_exit(super().__aexit__)
            await held.enter_async_context(self._env.serving())
            # Both have started. `pop_all` moves their exits to `_held`, so the end of this block ends nothing.
            self._held = held.pop_all()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._held.aclose()

    async def __call__(self, task: Task, policy: RolloutPolicy) -> Rollout:
        """Plays one episode. Raises RolloutError if the episode failed, with the reason that the episode gives."""
        session = EpisodeSession(task, policy, self._config)
        async with self.playing(session) as address:
            (slot,) = self._env.slots(task.row["task"])  # a slot is the plan of one episode
            episode = await self._env.run_slot(slot, self._context(task, f"{address}/v1"))
            if not self._env.complete(episode):  # the environment says that the episode failed
                raise RolloutError(_why(episode))
        return _rollout(episode, session)

    def _context(self, task: Task, base_url: str) -> Any:
        """The ModelContext of `verifiers` for an episode: the model that the agents ask, its address, and its sampling.
        `base_url`: the address."""
        model = task.tokenizer.name_or_path
        client = vf.TrainClientConfig(
            base_url=base_url,
            # The client reads its API key from this variable, which is not set. The default variable may have a key of
            # the user, which must not be sent here.
            api_key_var="REPLAY_NO_KEY",
            renderer=self._renderer_of(model),
            renderer_model_name=model,
        )
        template_kwargs = dict(task.chat_template_kwargs)
        if self._asks_for_date(task.tokenizer, model):
            # The argument has no time of day: `verifiers` caches a renderer for each set of arguments, so with a time
            # each rollout would add a renderer.
            template_kwargs[DAY] = task.began.date().isoformat()
        # For settings that are not in a request, such as top_k, the session takes the values of the generator.
        sampling: dict[str, Any] = {
            "temperature": task.sampling.temperature,
            "top_p": task.sampling.top_p,
            "max_tokens": task.sampling.max_tokens,
        }
        if template_kwargs:
            sampling["chat_template_kwargs"] = template_kwargs
        return vf.ModelContext(model=MODEL, client=client, sampling=vf.SamplingConfig(**sampling))

    def _asks_for_date(self, tokenizer: Any, model: str) -> bool:
        """True if the chat template asks for today's date, and TemplateRenderer is the renderer. No other renderer
        knows the argument DAY."""
        renderer = self._renderer_of(model) or {}
        if renderer.get("import_path") != _TEMPLATE_RENDERER:
            return False
        return "strftime_now" in str(getattr(tokenizer, "chat_template", ""))

    def _renderer_of(self, model: str) -> dict[str, Any] | None:
        """The fields of the RendererConfig for a model. None: `renderers` knows the model by its name, and itself
        chooses a renderer. `model` "": the model is not known yet."""
        if self._renderer.get("name"):  # the user has chosen a renderer
            return dict(self._renderer)
        if model in MODEL_RENDERER_MAP and not self._renderer:
            return None
        # The fields of the user come last, so they replace the others.
        return {"name": "custom", "import_path": _TEMPLATE_RENDERER, **self._renderer}


async def _generate(dialect: Dialect, session: Session, request: web.Request, raw: bytes) -> web.StreamResponse:
    """Answers a request of vLLM's `/inference/v1/generate`. `raw`: its body."""
    assert isinstance(session, EpisodeSession)
    size = len(raw)
    # `parsed` checks the body, and passes it to `_ask_of`. `worked` does this in a thread if the body is large.
    read_ask = partial(_ask_of, size)
    parse = partial(parsed, _PATH, raw, session.task.max_length, read_ask)
    ask = await worked(size, parse)
    session.trace_ids.add(request.headers.get(_TRACE_HEADER, ""))
    completion = await session.draw(ask)
    return web.json_response(_answer(completion))


def _ask_of(size: int, body: dict[str, Any]) -> Ask:
    """The request with this body, as an Ask. `size`: the number of bytes of the body. Raises Refusal for a body with
    images, or with token ids that are no whole numbers."""
    if body.get("features") or body.get("content_parts"):
        raise Refusal("the generator takes text only, no images", field="features")
    token_ids = body["token_ids"]
    if not isinstance(token_ids, list) or not all(type(token) is int for token in token_ids):
        raise Refusal("token_ids must be a list of whole numbers", field="token_ids")
    params = body.get("sampling_params") or {}
    sampling = {}
    for name in ("temperature", *TRUNCATING):
        if params.get(name) is not None:
            sampling[name] = params[name]
    return Ask(prompt=token_ids, max_tokens=params.get("max_tokens"), sampling=sampling, size=size)


def _answer(completion: Completion) -> dict[str, Any]:
    """The body of an answer with this completion, in the form of vLLM's `/inference/v1/generate`."""
    logprobs = []
    for token, logprob in zip(completion.token_ids, completion.logprobs, strict=True):
        if not math.isfinite(logprob):
            # JSON has only finite numbers. The 0 reaches no trainer: the trainer gets the session's completion, which
            # still has NaN for this token.
            logprob = 0.0
        logprobs.append({"token": f"token_id:{token}", "logprob": logprob})
    choice = {
        "index": 0,
        "token_ids": completion.token_ids,
        "logprobs": {"content": logprobs},
        "finish_reason": completion.finish_reason,
    }
    return {"request_id": "", "choices": [choice]}


def _prompt(task: Any) -> Prompt:
    """A task as a prompt. The text of the prompt is for people and reward functions only: the episode decides what the
    policy reads."""
    text = task.data.prompt_text or task.data.name or "(the user of the environment begins)"
    # `__call__` takes the task itself from the row.
    row = {**task.data.model_dump(mode="json"), "prompt": text, "task": task}
    return Prompt(prompt_id=task.key, content=text, row=row)


def _rollout(episode: Any, session: EpisodeSession) -> Rollout:
    """The rollout of an episode, with its reward. Raises RolloutError if there is nothing to train on, or if the agents
    have different rewards."""
    # The traces of agents that are trained, if they have asked this session for a completion.
    traces = [trace for trace in episode.traces if trace.agent.trainable and trace.id in session.trace_ids]
    ends: list[Exchange] = []  # the last exchange of each branch
    for trace in traces:
        for tokens in _branches(trace):
            # `besides` gives branches with equal tokens different exchanges.
            end = session.exchanges.that_drew(tokens, besides=ends)
            ends.append(end)
    sequences = session.exchanges.sequences(session.task.sampling, ends)
    if not sequences:
        raise RolloutError("no agent of the environment that is trained asked the policy for anything")
    return Rollout(
        sequences,
        reward=_reward_of(traces),
        finish_reason=_finish_reason(traces[-1]),
        info={"episode": episode},
        metrics=_metrics_of(traces, session),
    )


def _reward_of(traces: Sequence[Any]) -> float | None:
    """The reward that all agents of an episode got; None: the environment gave no reward. Raises RolloutError if the
    agents got different rewards.

    `traces`: the traces of the agents that are trained, at least one.
    """
    rewards = [trace.reward for trace in traces]
    if len(set(rewards)) > 1:
        listed = ", ".join(f"{trace.agent.name} {trace.reward:g}" for trace in traces)
        raise RolloutError(
            f"a rollout has one reward, and the agents of the environment got different ones ({listed}): make all but "
            "one not trainable, or give them the same"
        )
    if not any(trace.rewards for trace in traces):  # no trace has any part of a reward
        return None
    reward: float = rewards[0]
    return reward


def _metrics_of(traces: Sequence[Any], session: EpisodeSession) -> dict[str, float]:
    """The metrics of an episode, by name. They are the parts of the reward, the metrics of `verifiers`, and the number
    of refused requests. The value of a part or metric is its mean over the traces that have it."""
    values: dict[str, list[float]] = {"refusals": [float(session.refusals)]}
    for trace in traces:
        trace_values = {}
        for name, reward in trace.rewards.items():
            if reward is not None:
                trace_values[name] = reward.value
        for name, metric in trace.metrics.items():  # a metric replaces a part of the reward with the same name
            if metric is not None:
                trace_values[name] = metric
        for name, value in trace_values.items():
            values.setdefault(name, []).append(float(value))
    return {name: float(np.mean(numbers)) for name, numbers in values.items()}


def _branches(trace: Any) -> Iterator[list[int]]:
    """The tokens of each branch that is trained on, up to the end of the last turn of the policy. The policy has read
    none of the tokens behind that turn."""
    for branch in trace.branches:
        tokens: list[int] = []
        end = 0
        for node in branch.nodes:  # a node is a message
            tokens += node.token_ids
            is_of_policy = any(node.mask)  # the mask is True for tokens that the policy drew
            if is_of_policy:
                end = len(tokens)
        if branch.trainable and end:  # `end` 0: the policy wrote nothing
            yield tokens[:end]


def _finish_reason(trace: Any) -> str:
    """The finish reason of a trace, in the words of the generator; "": the reason of the last turn of the policy."""
    if trace.is_timeout:
        return "timeout"
    if trace.stop_condition == "max_turns":
        return "turns"
    if trace.is_truncated:
        return "length"
    return ""


def _why(episode: Any) -> str:
    """The reason why an episode failed, in one line."""
    errors = [*episode.errors]
    for trace in episode.traces:
        if not trace.ok:
            errors += trace.errors
    if not errors:
        return "the environment says that the episode is not complete, and gives no reason"
    # Show the last error, because it ended the episode. If there were earlier errors, the episode went on after them.
    return f"the episode failed with {errors[-1].type}: {_in_one_line(errors[-1].message):.500}"


def _missing(error: ModuleNotFoundError) -> str:
    """The reason why an environment cannot be imported: its own module is missing, or a module that it imports.

    `error`: the error of `verifiers`, caused by Python's error.
    """
    # The message of `verifiers` names only the module of the environment. The missing module may be another one.
    cause = error.__cause__
    if isinstance(cause, ModuleNotFoundError) and f"import {cause.name!r}" not in str(error):
        return f"it needs the module {cause.name!r}, which is not installed"
    return str(error)


def _in_one_line(error: object) -> str:
    """The message of an error without line breaks. `error`: an error, or its message."""
    if isinstance(error, ValidationError):
        return explain(error)
    return " ".join(str(error).split())

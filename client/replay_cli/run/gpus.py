"""Finds the GPUs of this machine that a person names in the setting `gpus` of a run.

A number is the position of a GPU among those that the shell sees: the GPUs of CUDA_VISIBLE_DEVICES if it is set, as
under Slurm, and else those that nvidia-smi lists. The environment of a part names a GPU as CUDA_VISIBLE_DEVICES does.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence

VARIABLE = "CUDA_VISIBLE_DEVICES"
_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
"""Makes CUDA number the GPUs as nvidia-smi does. Otherwise the fastest GPU comes first."""
_QUERY = ("nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader")
_SECONDS = 60.0
"""The most seconds that nvidia-smi may take. It is slow on a machine that has just started."""
_UUID = re.compile(r"(GPU|MIG)-[\w/-]+")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_MOST = 1024
"""The highest number of a GPU."""


class Gpus:
    """The GPUs that the shell sees, in its order."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        """Starts nothing: nvidia-smi is called when it is needed. `environ`: the environment of the shell."""
        self._environ = environ
        self._restricted = environ.get(VARIABLE)
        """The value of CUDA_VISIBLE_DEVICES in the shell; None: it is not set."""
        self._listed: dict[str, str] | None = None
        """The UUIDs by index; None: nvidia-smi has not been called."""
        self._why_none = ""
        """The reason why nvidia-smi failed; empty: it did not fail."""

    @property
    def visible(self) -> list[str]:
        """The names of the GPUs that the shell sees: indices and UUIDs, as in CUDA_VISIBLE_DEVICES."""
        if self._restricted is None:
            return list(self._uuid_by_index())  # the keys: the indices
        names = []
        for name in self._restricted.split(","):
            name = name.strip()
            if not (name.isdecimal() or _UUID.fullmatch(name)):
                break  # as CUDA does: -1, an empty name and anything else end the list
            names.append(name)
        return names

    def find(self, wanted: object) -> list[str]:
        """The names of the GPUs that a person writes: "0,2-3", [0, 2, 3], 0, or UUIDs.

        Raises ValueError for an entry that names no GPU, for a GPU that the shell does not see, and for a GPU that is
        named twice.
        """
        names: list[str] = []
        for gpu in _numbers_and_uuids(wanted):
            name = self._with_number(gpu) if isinstance(gpu, int) else self._with_uuid(gpu)
            if name in names:
                raise ValueError(f"{wanted!r} names the GPU {gpu} twice")
            names.append(name)
        if not names:
            raise ValueError(f"{wanted!r} names no GPUs")
        return names

    def environment(self, names: Sequence[str]) -> dict[str, str]:
        """The variables of a process that is to see only these GPUs."""
        # If CUDA_VISIBLE_DEVICES is set, its numbers mean GPUs in the order that the shell has chosen.
        order = _ORDER if self._restricted is None else {}
        return {VARIABLE: ",".join(names), **order}

    def _with_number(self, number: int) -> str:
        """The name of the GPU with this number. Raises ValueError."""
        visible = self.visible
        if number < len(visible):
            return visible[number]
        if self._restricted is not None:
            here = f"{VARIABLE}={self._restricted} shows {len(visible)}"
        elif self._why_none:
            here = f"there is none here: {self._why_none}"
        else:
            here = f"nvidia-smi lists {len(visible)}"
        raise ValueError(f"there is no GPU {number}; {here}, and numbers begin with 0")

    def _with_uuid(self, uuid: str) -> str:
        """The name of the GPU with this UUID. Raises ValueError."""
        visible = self.visible
        for name in visible:
            # CUDA accepts the beginning of a UUID.
            if name.startswith(uuid):
                return name
        # The shell may name the same GPU by its index.
        for index, listed in self._uuid_by_index().items():
            if listed.startswith(uuid) and index in visible:
                return index
        if uuid.startswith("MIG-") and self._restricted is None:
            return uuid  # nvidia-smi lists only whole GPUs, so this name cannot be checked
        listed = ", ".join(self._uuid_by_index().values()) or "nvidia-smi lists none"
        raise ValueError(f"there is no GPU {uuid} here: {listed}")

    def _uuid_by_index(self) -> dict[str, str]:
        """The UUID of each GPU of the machine by its index, as nvidia-smi lists them. Empty if nvidia-smi fails."""
        if self._listed is None:
            self._listed = {}
            for line in self._lines():
                index, _, uuid = line.partition(",")
                self._listed[index.strip()] = uuid.strip()
        return self._listed

    def _lines(self) -> list[str]:
        """The lines of nvidia-smi. If nvidia-smi fails, returns no lines, and sets `_why_none` to the reason."""
        try:
            result = subprocess.run(
                _QUERY, env=self._environ, capture_output=True, text=True, timeout=_SECONDS, check=True
            )
        except FileNotFoundError:
            self._why_none = "nvidia-smi is not on the PATH"
        except subprocess.CalledProcessError as error:
            output = " ".join((error.stdout + error.stderr).split())
            self._why_none = f"nvidia-smi says: {output[:200]}"
        except (OSError, subprocess.TimeoutExpired) as error:
            self._why_none = f"nvidia-smi gives no answer: {error}"
        else:
            return [line for line in result.stdout.splitlines() if line.strip()]
        return []


def _numbers_and_uuids(wanted: object) -> list[int | str]:
    """Splits what a person writes into single GPUs: numbers and UUIDs. Raises ValueError for all other texts."""
    entries = wanted if isinstance(wanted, list) else str(wanted).split(",")
    gpus: list[int | str] = []
    for entry in entries:
        text = str(entry).strip()
        if _UUID.fullmatch(text):
            gpus.append(text)
            continue
        span = _RANGE.fullmatch(text)  # "3" or "2-7"
        if span is None or isinstance(entry, bool):
            raise ValueError(f'{wanted!r} names no GPUs: write "0,1", "2-7", [0, 1] or UUIDs ("GPU-...")')
        first = int(span[1])
        last = int(span[2] or first)
        if last < first or last > _MOST:
            raise ValueError(f"{text!r} is no range of GPUs: the first comes first, and {_MOST} is the most")
        gpus.extend(range(first, last + 1))
    return gpus

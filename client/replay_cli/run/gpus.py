"""Finds the GPUs of this machine that a person names in the setting `gpus` of a run.

A person names a GPU by a number or by its UUID. A number is the position of the GPU among those that the shell sees. If
CUDA_VISIBLE_DEVICES is set, as under Slurm, the shell sees the GPUs in this variable. Otherwise it sees all GPUs that
nvidia-smi lists.

A part of the run finds its GPUs in a CUDA_VISIBLE_DEVICES of its own. So the name of a GPU in this module is its entry
in that variable: an index or a UUID.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence

VARIABLE = "CUDA_VISIBLE_DEVICES"
_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
"""The variable that makes CUDA number the GPUs as nvidia-smi does. Otherwise CUDA puts the fastest GPU first."""
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
        """`environ`: the environment of the shell. nvidia-smi is called later, by the first method that needs it."""
        self._environ = environ
        self._visible_devices = environ.get(VARIABLE)
        """The value of CUDA_VISIBLE_DEVICES in the shell; None: it is not set."""
        self._uuids: dict[str, str] | None = None
        """The UUIDs by index, as nvidia-smi lists them; None: nvidia-smi has not been called."""
        self._why_failed = ""
        """The reason why nvidia-smi failed; empty: it did not fail."""

    @property
    def visible(self) -> list[str]:
        """The names of the GPUs that the shell sees: indices and UUIDs, as in CUDA_VISIBLE_DEVICES."""
        if self._visible_devices is None:
            return list(self._uuid_by_index())  # the keys, which are the indices
        names = []
        for entry in self._visible_devices.split(","):
            name = entry.strip()
            is_name = name.isdecimal() or _UUID.fullmatch(name)
            if not is_name:
                break  # CUDA ignores this entry, for example -1 or an empty one, and all entries after it
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
        # If the shell has set CUDA_VISIBLE_DEVICES, the numbers in it count the GPUs in the shell's own order, so leave
        # this order as it is.
        order = _ORDER if self._visible_devices is None else {}
        return {VARIABLE: ",".join(names), **order}

    def _with_number(self, number: int) -> str:
        """The name of the GPU with this number. Raises ValueError if there is no such GPU."""
        visible = self.visible
        if number < len(visible):
            return visible[number]
        if self._visible_devices is not None:
            available = f"{VARIABLE}={self._visible_devices} shows {len(visible)}"
        elif self._why_failed:
            available = f"there is none here: {self._why_failed}"
        else:
            available = f"nvidia-smi lists {len(visible)}"
        raise ValueError(f"there is no GPU {number}; {available}, and numbers begin with 0")

    def _with_uuid(self, uuid: str) -> str:
        """The name of the GPU whose UUID is `uuid` or begins with it, as CUDA accepts the beginning of a UUID.

        Raises ValueError if there is no such GPU.
        """
        visible = self.visible
        for name in visible:
            if name.startswith(uuid):
                return name
        # The shell may name the same GPU by its index.
        for index, listed_uuid in self._uuid_by_index().items():
            if listed_uuid.startswith(uuid) and index in visible:
                return index
        if uuid.startswith("MIG-") and self._visible_devices is None:
            return uuid  # nvidia-smi lists only whole GPUs, so the UUID of a part of a GPU (MIG) cannot be checked
        listed_uuids = ", ".join(self._uuid_by_index().values()) or "nvidia-smi lists none"
        raise ValueError(f"there is no GPU {uuid} here: {listed_uuids}")

    def _uuid_by_index(self) -> dict[str, str]:
        """The UUID of each GPU of the machine by its index, as nvidia-smi lists them. Empty if nvidia-smi fails."""
        if self._uuids is None:
            self._uuids = {}
            for line in self._nvidia_smi_lines():
                index, _, uuid = line.partition(",")
                self._uuids[index.strip()] = uuid.strip()
        return self._uuids

    def _nvidia_smi_lines(self) -> list[str]:
        """The lines of nvidia-smi. If nvidia-smi fails, returns no lines, and sets `_why_failed` to the reason."""
        try:
            result = subprocess.run(
                _QUERY, env=self._environ, capture_output=True, text=True, timeout=_SECONDS, check=True
            )
        except FileNotFoundError:
            self._why_failed = "nvidia-smi is not on the PATH"
        except subprocess.CalledProcessError as error:
            output = " ".join((error.stdout + error.stderr).split())
            self._why_failed = f"nvidia-smi says: {output[:200]}"
        except (OSError, subprocess.TimeoutExpired) as error:
            self._why_failed = f"nvidia-smi gives no answer: {error}"
        else:
            return [line for line in result.stdout.splitlines() if line.strip()]
        return []


def _numbers_and_uuids(wanted: object) -> list[int | str]:
    """Splits what a person writes into the numbers and UUIDs of single GPUs. Raises ValueError for anything else."""
    entries = wanted if isinstance(wanted, list) else str(wanted).split(",")
    gpus: list[int | str] = []
    for entry in entries:
        text = str(entry).strip()
        if _UUID.fullmatch(text):
            gpus.append(text)
            continue
        number_or_range = _RANGE.fullmatch(text)  # "3" or "2-7"
        if number_or_range is None:
            raise ValueError(f'{wanted!r} names no GPUs: write "0,1", "2-7", [0, 1] or UUIDs ("GPU-...")')
        first = int(number_or_range[1])
        last = int(number_or_range[2] or first)
        if last < first or last > _MOST:
            raise ValueError(f"{text!r} is no range of GPUs: the first comes first, and {_MOST} is the most")
        gpus.extend(range(first, last + 1))
    return gpus

"""Published weights: folders `step-N`. Generators load them, and a killed trainer resumes from them.

    <output_dir>/step-12/      config, safetensors and tokenizer, as save_pretrained writes them
                 generation_config.json  as the model had it when the run began, byte for byte
                 probe.json    log-probabilities of a fixed token sequence under these weights, to check a reload
                 trainer.pt    optimizer and random state: a run can resume from this folder (not every folder)
                 optimizer/    each rank's rows of the optimizer state (training checkpoints of partitioned weights)
                 delta/        the changes since the version before, for generators that fetch them (not every folder)
                 manifest.json version, files with their sizes and checksums, facts about the model, name of the
                               server's checkpoint. It is written last: a folder with a manifest was written by a
                               trainer, and is complete

* A folder gets its name when it is complete. A folder with a training checkpoint is flushed to the disk before that.
* Only two kinds of files are removed: files that a manifest names, and files that a trainer left behind that was killed
  while it added a training checkpoint.
* A resume skips a training checkpoint in which a file is missing or has another size, and refuses a training checkpoint
  in which a file has other bytes than were written.
"""

from __future__ import annotations

import copy
import json
import os
import random
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME, cached_file

from replay_generator.engines.weights import MANIFEST, model_facts, no_progress_bars
from replay_generator.policy.remote import checksum_of, write_deltas
from replay_trainer.ranks import gather_full


@contextmanager
def writing(path: Path, *kinds: type[Exception]) -> Iterator[None]:
    """Replaces an OSError that names no file by an OSError that names `path` and the free space.

    `kinds`: further errors that the block raises if it cannot write; they are replaced too.
    """
    caught: tuple[type[Exception], ...] = (OSError, *kinds)
    try:
        yield
    except caught as error:
        if isinstance(error, OSError) and (error.errno is None or error.filename is not None):
            raise  # the error names its file, or does not come from the operating system
        # The nearest folder above the path that exists is on the same disk.
        there = next(folder for folder in path.absolute().parents if folder.exists())
        free = shutil.disk_usage(there).free / 2**20
        raise OSError(f"{path} cannot be written ({free:.0f} MiB are free there): {error}") from error


def write_whole(path: Path, text: str) -> None:
    """Writes or replaces a small file at once: a reader finds the old text or the new text, and never a part."""
    unfinished = path.with_name(path.name + ".tmp")
    with writing(unfinished):
        unfinished.write_text(text)
    os.replace(unfinished, path)


PROBE_LENGTH = 16
"""Tokens in the probe sequence."""
RANKS_FOLDER = "optimizer"
"""The subfolder with the optimizer state of ranks. These safetensors files must not be beside the config, because
engines would load them as weights."""
_FOLDER = re.compile(r"step-(\d+)")
_STATE = "trainer.pt"
_UNFINISHED = ".tmp"
"""The end of the name of a folder that is not complete."""


def publish_weights(
    model: Any,
    tokenizer: Any,
    directory: Path,
    version: int,
    keep: int,
    probe: dict[str, list[Any]] | None,
    *,
    weights: dict[str, Any] | None = None,
    facts: Mapping[str, Any] | None = None,
    frequencies: Mapping[str, Any] | None = None,
    state: dict[str, Any] | None = None,
    server_checkpoint: str = "",
    parts: Mapping[str, tuple[Path, str]] | None = None,
) -> Path:
    """Writes `directory`/step-`version`, and returns its path. Keeps the newest `keep` folders, and removes older ones.

    `model` is a PreTrainedModel, or an object that saves a model: a WholeModel, an Adapter or a WithDelta. `tokenizer`
    is the tokenizer of the model or None. `weights` is the state dict to save; None: the model's own at this moment.
    Without a `probe`, generators cannot check the weights that they load, and warn. `facts`: facts about the model,
    for the manifest; None: `model_facts` of model and tokenizer. `frequencies`: `frequency_facts`; None: the model has
    no choice of frequencies. `state` makes the folder a training checkpoint; the newest training checkpoint is never
    removed. `server_checkpoint`: the name of the server's checkpoint, for the manifest. `parts`: files of the training
    checkpoint to move into the folder: name in the folder -> (path now, checksum). Raises FileExistsError if the folder
    exists.
    """
    folder = directory.resolve() / f"step-{version}"
    if folder.exists():
        raise FileExistsError(f"{folder} exists: choose another output_dir, or continue that run with resume=True")
    unfinished = folder.with_name(folder.name + _UNFINISHED)
    shutil.rmtree(unfinished, ignore_errors=True)  # a killed run may have left it
    unfinished.mkdir(parents=True)
    with no_progress_bars():
        # A copy of the dict, because save_pretrained removes tensors from its argument.
        writer_of(model).save_pretrained(unfinished, state_dict=None if weights is None else dict(weights))
    if tokenizer is not None:
        tokenizer.save_pretrained(unfinished)
    if probe is not None:
        (unfinished / "probe.json").write_text(json.dumps(probe))
    if state is not None:
        torch.save(state, unfinished / _STATE)
    parts = parts or {}
    for name, (path, _) in parts.items():
        (unfinished / name).parent.mkdir(exist_ok=True)
        path.rename(unfinished / name)
    files = sorted(path for path in unfinished.rglob("*") if path.is_file())
    # Every file so far: name in the folder -> bytes. The manifest itself is written last, and not listed.
    sizes = {str(path.relative_to(unfinished)): path.stat().st_size for path in files}
    if facts is None:
        facts = model_facts(getattr(model, "config", None), tokenizer)
    manifest = {"version": version, "model": dict(facts), "files": sizes, "server_checkpoint": server_checkpoint}
    if frequencies:
        manifest["frequencies"] = dict(frequencies)
    manifest["checksums"] = {
        name: parts[name][1] if name in parts else checksum_of(unfinished / name) for name in sizes
    }
    (unfinished / MANIFEST).write_text(json.dumps(manifest, indent=1))
    if state is not None:  # a training checkpoint is on the disk before its folder gets its name
        for path in [*unfinished.rglob("*"), unfinished]:
            to_disk(path)
    unfinished.rename(folder)
    if state is not None:
        to_disk(folder.parent)  # the new name of the folder
    kept = {*published(directory)[-keep:], *saved(directory)[-1:]}
    for old in published(directory):
        if old not in kept:
            remove(old)
    return folder


def add_state(
    folder: Path,
    state: dict[str, Any],
    server_checkpoint: str = "",
    parts: Mapping[str, tuple[Path, str]] | None = None,
) -> None:
    """Makes a published folder a training checkpoint. The arguments are those of `publish_weights`.

    Other programs may read the folder meanwhile: existing files stay as they are, except the manifest. The manifest is
    replaced last, and the new files do not count until then.
    """
    aside = folder.with_name(folder.name + _UNFINISHED)
    shutil.rmtree(aside, ignore_errors=True)  # a killed run may have left it
    aside.mkdir()
    torch.save(state, aside / _STATE)
    added = {_STATE: (aside / _STATE, checksum_of(aside / _STATE)), **(parts or {})}
    manifest = _manifest(folder) | {"server_checkpoint": server_checkpoint}
    for name, (path, checksum) in added.items():
        manifest["files"][name] = path.stat().st_size
        manifest["checksums"][name] = checksum
        (folder / name).parent.mkdir(exist_ok=True)
        path.rename(folder / name)
    # The files are on the disk before the manifest names them.
    for path in [*folder.rglob("*"), folder, folder.parent]:
        to_disk(path)
    (aside / MANIFEST).write_text(json.dumps(manifest, indent=1))
    to_disk(aside / MANIFEST)
    os.replace(aside / MANIFEST, folder / MANIFEST)
    to_disk(folder)
    aside.rmdir()


def published(directory: Path) -> list[Path]:
    """The complete folders in `directory`, oldest version first, as absolute paths."""
    folders = [path.parent for path in directory.resolve().glob(f"step-*/{MANIFEST}")]
    return sorted((path for path in folders if _FOLDER.fullmatch(path.name)), key=version_of)


def frequencies_of(folder: Path) -> dict[str, Any]:
    """The `frequency_facts` in a published folder; empty: the model leaves no choice of frequencies."""
    found: dict[str, Any] = _manifest(folder).get("frequencies", {})
    return found


def saved(directory: Path) -> list[Path]:
    """The published folders that hold an undamaged training checkpoint."""
    folders = []
    for folder in published(directory):
        files = _files(folder)
        if _STATE in files and _are_there(folder, files):
            folders.append(folder)
    return folders


def damaged(directory: Path) -> list[Path]:
    """The published folders that lost a file or a part of one."""
    return [folder for folder in published(directory) if not _are_there(folder, _files(folder))]


def why_damaged(folder: Path, rank: int = 0, ranks: int = 1) -> str:
    """The error for a damaged file of a training checkpoint, with the remedy; empty: no file is damaged.

    A file is damaged if its bytes are not the bytes that were written. Each rank reads all bytes of a share of the
    files: every `ranks`-th file from file number `rank` on.
    """
    for name, checksum in list(_manifest(folder)["checksums"].items())[rank::ranks]:
        if checksum_of(folder / name) != checksum:
            return (
                f"{folder / name} is damaged: its bytes are not what was written. Put a copy of that file in its "
                f"place, or move {folder.name} out of its folder to resume from the training checkpoint before it"
            )
    return ""


def version_of(folder: Path) -> int:
    """The policy version of this folder, from its name."""
    match = _FOLDER.fullmatch(folder.name)
    if match is None:
        raise ValueError(f"{folder} is no folder of published weights: its name must be step-N")
    return int(match[1])


def load_weights(folder: Path, model: Any) -> dict[str, Any]:
    """The state dict of a published folder, for a model like `model`."""
    with no_progress_bars():
        saved_model = type(model).from_pretrained(
            folder,
            dtype=model.dtype,
            local_files_only=True,
            generation_config=GenerationConfig(),  # not from the folder, whose file transformers may refuse
        )
    weights: dict[str, Any] = saved_model.state_dict()
    return weights


def load_state(folder: Path, *, mapped: bool = False) -> dict[str, Any]:
    """The `state` of a training checkpoint. `mapped`: its tensors are read from the file only when they are used."""
    # weights_only: tensors and plain containers, never code.
    state: dict[str, Any] = torch.load(folder / _STATE, map_location="cpu", weights_only=True, mmap=mapped)
    return state


def probe_tokens(model: Any, tokenizer: Any = None) -> list[int]:
    """Random tokens, the same for every version of a model, without the special tokens of the tokenizer."""
    vocabulary = len(model.get_input_embeddings().weight)
    if tokenizer is not None:
        vocabulary = min(vocabulary, len(tokenizer))  # engines refuse ids that exist only to pad the embedding
    special = set() if tokenizer is None else set(tokenizer.all_special_ids)
    return random.Random(0).choices(sorted(set(range(vocabulary)) - special), k=PROBE_LENGTH)


def remove(folder: Path) -> None:
    """Removes the files of the manifest and the files that a killed `add_state` left. Removes the folder, too, if it is
    empty then: files that somebody else has put there stay."""
    shutil.rmtree(folder.with_name(folder.name + _UNFINISHED), ignore_errors=True)
    listed = [folder / name for name in _files(folder)]
    # `add_state` puts these files into the folder before the manifest lists them.
    of_state = [folder / _STATE, *(folder / RANKS_FOLDER).glob("*")]
    for path in [*listed, *of_state]:
        path.unlink(missing_ok=True)
    # The manifest is removed after all other files. If this process is killed before that, the folder still counts as
    # published, and the next call finishes the removal.
    (folder / MANIFEST).unlink()
    # In reverse order, a folder comes after the folders inside it.
    subfolders = sorted((path for path in folder.rglob("*") if path.is_dir()), reverse=True)
    for path in [*subfolders, folder]:
        if not any(path.iterdir()):
            path.rmdir()


def to_disk(path: Path) -> None:
    """Flushes the content of a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a published folder. Raises ValueError if it is damaged."""
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
    except ValueError as error:
        raise ValueError(f"{folder / MANIFEST} is damaged ({error}): move {folder.name} out of its folder") from error
    return manifest


def _files(folder: Path) -> dict[str, int]:
    """The files of the manifest, relative to the folder, with their sizes in bytes."""
    return dict(_manifest(folder)["files"])


def _are_there(folder: Path, files: dict[str, int]) -> bool:
    """True if each of `files` exists in the folder and has its size."""
    return all((folder / name).is_file() and (folder / name).stat().st_size == size for name, size in files.items())


def why_other_tensors(stored: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> str:
    """The difference between stored tensors and those of a model in names or shapes; "": there is none."""
    in_one_only = sorted(set(stored) ^ set(own))
    if in_one_only:
        return f"they differ in {len(in_one_only)} tensors, such as {in_one_only[0]!r}"
    for name, tensor in own.items():
        if tensor.shape != stored[name].shape:
            return f"{name!r} has the shape {list(stored[name].shape)} (here {list(tensor.shape)})"
    return ""


class WholeModel:
    """Saves a model of transformers, each time with the same generation_config.json.

    This file is a copy of the file with which the model was loaded, byte for byte, because people deploy the last
    version. If there was no such file, or somebody has changed the model's generation_config in code, the file has the
    settings of the model at the start of the run. transformers would write the file anew each time. But transformers
    refuses to write settings that contradict each other, such as a temperature without do_sample, and many checkpoints
    have such settings.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        content = _generation_file_of(model)
        self.has_file = content is not None
        """True if the model was loaded from a generation_config.json, and its settings are still the same."""
        self._generation_config = _described(model) if content is None else content
        """The content of the file; None: the model cannot generate."""

    @property
    def config(self) -> Any:
        """The configuration of the model."""
        return self._model.config

    def save_pretrained(self, folder: str | os.PathLike[str], state_dict: Mapping[str, Tensor] | None = None) -> None:
        """Writes weights to a folder, as PreTrainedModel.save_pretrained does."""
        # transformers would refuse to write some settings. So it writes an empty generation_config here, and the file
        # is replaced below. A shallow copy gets the empty one, because another thread may be using the model meanwhile.
        writable = object.__new__(type(self._model))
        writable.__dict__.update(self._model.__dict__)
        writable.generation_config = GenerationConfig()
        writable.save_pretrained(folder, state_dict=state_dict)
        file = Path(folder) / GENERATION_CONFIG_NAME
        if self._generation_config is not None:
            file.write_bytes(self._generation_config)
        else:
            file.unlink(missing_ok=True)  # transformers may have written the empty generation_config

    def go_on_from(self, folder: Path) -> None:
        """Lets `save_pretrained` write the generation_config.json of this published folder from now on, if the folder
        has this file."""
        with suppress(FileNotFoundError):
            self._generation_config = (folder / GENERATION_CONFIG_NAME).read_bytes()


def writer_of(model: Any) -> Any:
    """The object that saves `model` in published folders: a WholeModel, or `model` itself if it is no
    PreTrainedModel."""
    if isinstance(model, PreTrainedModel):
        return WholeModel(model)
    return model


def _generation_file_of(model: PreTrainedModel) -> bytes | None:
    """The generation_config.json from which a model was loaded. None: there is no such file, or the settings of the
    model are no longer the settings of the file."""
    if not model.name_or_path or _generation_config_of(model) is None:  # a model without a name was made in code
        return None
    # The errors of a file that does not exist, or that transformers cannot read.
    with suppress(OSError, ValueError):
        # For a name on the hub: the file in the local cache.
        found = cached_file(model.name_or_path, GENERATION_CONFIG_NAME, local_files_only=True)
        if found is not None:
            file = Path(found)
            loaded = GenerationConfig.from_pretrained(file.parent)
            if _settings(loaded) == _settings(model.generation_config):
                return file.read_bytes()
    return None


def _described(model: PreTrainedModel) -> bytes | None:
    """The content of generation_config.json as transformers would write it, also if transformers would refuse to write
    these settings. None: the model cannot generate."""
    config = _generation_config_of(model)
    if config is None:
        return None
    text: str = config.to_json_string(keys_to_pop=["compile_config"])  # transformers leaves this setting out, too
    return text.encode()


def _generation_config_of(model: PreTrainedModel) -> GenerationConfig | None:
    """The generation_config of a model; None: the model cannot generate."""
    return model.generation_config if model.can_generate() else None


def _settings(config: GenerationConfig) -> dict[str, Any]:
    """The settings of a configuration by which two configurations count as equal.

    The ids of the tokens for padding and for the beginning are left out, because TRL and many other programs set them
    in code.
    """
    settings: dict[str, Any] = json.loads(config.to_json_string(use_diff=False, ignore_metadata=True))
    settings.pop("pad_token_id", None)
    settings.pop("bos_token_id", None)
    return settings


class WithDelta:
    """Saves a model or an adapter in the dtype of the engines, together with the changes since the last version."""

    def __init__(self, model: Any, directory: Path, dtype: str) -> None:
        """`directory`: the folder with the versions so far. `dtype`: the name of the dtype of the engines."""
        self._model = writer_of(model)
        self._directory = directory
        self._dtype = getattr(torch, dtype)

    @property
    def config(self) -> Any:
        """The configuration of the model."""
        return self._model.config

    def save_pretrained(self, folder: Path, state_dict: Mapping[str, Tensor]) -> None:
        """Writes weights to a folder, as PreTrainedModel.save_pretrained does, and beside them the changes since the
        last version."""
        # By address and shape: tensors that share memory get the same cast tensor, and so still share memory.
        cast: dict[Any, Tensor] = {}
        for tensor in state_dict.values():
            key = (tensor.data_ptr(), tensor.shape)
            cast[key] = tensor.to(self._dtype) if tensor.is_floating_point() else tensor
        named = {name: cast[tensor.data_ptr(), tensor.shape] for name, tensor in state_dict.items()}
        self._model.save_pretrained(folder, state_dict=named)
        earlier = published(self._directory)
        if earlier:  # the first version has no version before it
            write_deltas(earlier[-1], folder)


WEIGHTS_FILE = "adapter_model.safetensors"


class Adapter:
    """The active LoRA adapter of a peft model, which is trained, published and restored in the place of whole weights.

    A published folder then holds `adapter_config.json`, with the name of the base model, and
    `adapter_model.safetensors`. With `merge_adapter` it holds whole weights: the base with the adapter added to it.
    """

    def __init__(self, model: Any, merged: bool) -> None:
        """`model` is a PeftModel; `merged`: publish whole weights.

        Raises ValueError if the model has another kind of adapter, several active adapters, or no weights to train.
        With `merged`, also if the adapter cannot be added to the base. Without `merged`, also if the base model has no
        name.
        """
        model.eval()  # LogprobModel gets only the base, which is inside of this model
        self.base: Any = model.get_base_model()
        """The transformers model. peft has put the layers of the adapter into it, so it computes with the adapter."""
        self._model = model
        active = list(model.active_adapters)
        if len(active) != 1:
            raise ValueError(f"one adapter must be active, not {active}: call set_adapter")
        self._name: str = active[0]
        """The name of the adapter in peft."""
        self._config = copy.copy(model.peft_config[self._name])
        kind = str(getattr(self._config.peft_type, "value", self._config.peft_type))
        if kind != "LORA":
            raise ValueError(f"GRPOTrainer trains LoRA adapters, and adapter {self._name!r} is {kind}")
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ValueError(f"no weight of adapter {self._name!r} is trainable: load it with is_trainable=True")
        self._config.inference_mode = True  # an engine that loads the adapter does not train it
        base_name = str(self._config.base_model_name_or_path or "")
        if not (merged or base_name):
            raise ValueError(
                "the base model has no name, so no engine could load an adapter of it: load it with from_pretrained, "
                "or publish whole weights with merge_adapter=True"
            )
        if merged:
            reason = why_not_mergeable(model)
            if reason:
                raise ValueError(f"{reason}, or publish the adapter itself, with merge_adapter=False")
        self._whole = WholeModel(self.base) if merged else None
        """Saves whole weights; None: the adapter is published."""
        # An absolute path, because a program that loads the adapter may run in another folder.
        self._config.base_model_name_or_path = str(Path(base_name).resolve()) if Path(base_name).is_dir() else base_name

    @classmethod
    def of(cls, model: Any, merged: bool) -> Adapter | None:
        """The adapter of `model`; None if whole weights are trained. Raises ValueError as the constructor does."""
        if callable(getattr(model, "get_base_model", None)):
            return cls(model, merged)
        if getattr(model, "_hf_peft_config_loaded", False):
            raise ValueError(
                "this model has an adapter of transformers (add_adapter, or a folder that holds an adapter): make a "
                "PeftModel instead, with peft.get_peft_model or PeftModel.from_pretrained(base, folder)"
            )
        if merged:
            raise ValueError("merge_adapter=True is for a peft model, and this model has no adapter")
        return None

    @property
    def config(self) -> Any:
        """The configuration of the base model."""
        return self.base.config

    @property
    def facts(self) -> dict[str, Any]:
        """The facts that must be the same in a resume, beside the `model_facts` of the base. Engines do not know these
        facts before they load the adapter."""
        return {"lora_rank": self._config.r, "lora_alpha": self._config.lora_alpha}

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the adapter, by their names in `adapter_model.safetensors`.

        They are the tensors being trained. But if weights are partitioned, they are whole copies, which all ranks make
        together; an adapter is small.
        """
        return {name: gather_full(tensor) for name, tensor in self._own().items()}

    def _own(self) -> dict[str, Tensor]:
        """The tensors being trained, partitioned if the weights are partitioned."""
        from peft import get_peft_model_state_dict

        # Embeddings belong to the base. With "auto", peft would ask the hub whether they were resized.
        tensors: dict[str, Tensor] = get_peft_model_state_dict(
            self._model, adapter_name=self._name, save_embedding_layers=False
        )
        return tensors

    def weights(self) -> dict[str, Tensor]:
        """The tensors of a published folder: those of the adapter, or of the whole model with the adapter added."""
        if self._whole is None:
            return self.tensors()
        # A copy, because adding the adapter to the base and taking it out again would change the base by rounding.
        merged: dict[str, Tensor] = copy.deepcopy(self._model).merge_and_unload().state_dict()
        return merged

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Sets the tensors of the adapter, on all ranks.

        If the names or shapes of `tensors` are not those of this adapter, sets nothing, and raises ValueError that
        names a tensor.
        """
        own = self._own()
        difference = why_other_tensors(tensors, own)
        if difference:
            raise ValueError(difference)
        for name, tensor in own.items():
            saved_tensor = tensors[name].to(tensor.device)
            with torch.no_grad():
                if isinstance(tensor, DTensor):
                    rows = distribute_tensor(saved_tensor, tensor.device_mesh, tensor.placements)
                    tensor.to_local().copy_(rows.to_local())
                else:
                    tensor.copy_(saved_tensor)

    def save_pretrained(self, folder: Path, state_dict: Mapping[str, Tensor]) -> None:
        """Writes `state_dict`, the result of `weights`, to a folder, as PreTrainedModel.save_pretrained does."""
        from safetensors.torch import save_file

        if self._whole is not None:
            self._whole.save_pretrained(folder, state_dict=dict(state_dict))
            return
        separate: dict[str, Tensor] = {}
        addresses: set[int] = set()
        for name, tensor in state_dict.items():
            contiguous = tensor.contiguous()  # safetensors refuses other tensors
            # With peft's ensure_weight_tying two modules share a tensor, but safetensors refuses shared memory.
            separate[name] = contiguous.clone() if contiguous.data_ptr() in addresses else contiguous
            addresses.add(contiguous.data_ptr())
        save_file(separate, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        self._config.save_pretrained(folder)

    def go_on_from(self, folder: Path) -> None:
        """Lets `save_pretrained` write the generation_config.json of this published folder from now on. Does nothing
        unless whole weights are published."""
        if self._whole is not None:
            self._whole.go_on_from(folder)

    def off(self) -> AbstractContextManager[None]:
        """Inside the context, the model computes without the adapter, as the base model."""
        context: AbstractContextManager[None] = self._model.disable_adapter()
        return context


def why_not_mergeable(model: Any) -> str:
    """The reason why the active adapter of a peft model cannot be added to its base, and the remedy; empty: it can.

    Two modules may share one weight: the embedding and the output head of many models do. The merged model has one
    weight there too. So an adapter must change both modules by the same parameters, or neither.
    """
    # The names of each parameter, by its identity. A shared weight has several names.
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for shared in names.values():
        # For each module with this weight, the ids of the adapter's parameters that change the module.
        changes = [_adapter_parameters(model, name) for name in shared]
        if all(change == changes[0] for change in changes):  # also if the weight is not shared
            continue
        modules = [_name_in_base(name) for name in shared]
        changed = [module for module, change in zip(modules, changes, strict=True) if change]
        how = f"changes {changed[0]} alone" if len(changed) == 1 else "changes each of them in its own way"
        return (
            f"{' and '.join(modules)} share one weight, and the adapter {how}, so no merged weight is right for both: "
            f"leave {' and '.join(changed)} out of the adapter's target_modules, modules_to_save and other settings"
        )
    return ""


def _adapter_parameters(model: Any, name: str) -> set[int]:
    """The ids of the parameters by which the active adapter changes the module that has this parameter of the base."""
    identities: set[int] = set()
    parts = name.split(".")
    for index, part in enumerate(parts):
        if part in _BASES:  # the module around this part is peft's
            wrapper = model.get_submodule(".".join(parts[:index]))
            for own_name, parameter in wrapper.named_parameters():
                # The name of a parameter of an adapter contains the name of this adapter.
                if set(own_name.split(".")) & set(model.active_adapters):
                    identities.add(id(parameter))
    return identities


_BASES = ("base_layer", "original_module")
"""The names under which peft's modules hold the module that they wrap."""
_OF_PEFT = ("token_adapter", *_BASES)
"""The parts that peft adds to the name of a module of the base."""


def _name_in_base(name: str) -> str:
    """The name in the base model of the module that has a parameter, without the modules of peft around it."""
    parts = name.removeprefix("base_model.model.").split(".")[:-1]
    return ".".join(part for part in parts if part not in _OF_PEFT)

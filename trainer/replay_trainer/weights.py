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
* Only two kinds of files are removed: files that a manifest names, and files that a trainer left behind when it was
  killed while it added a training checkpoint.
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
    """Surrounds a block that writes to `path`. If the block raises an OSError that names no file, replaces this error
    by an OSError that names `path` and the free space.

    `kinds`: further errors that the block raises if it cannot write. They are replaced, too.
    """
    caught: tuple[type[Exception], ...] = (OSError, *kinds)
    try:
        yield
    except caught as error:
        if isinstance(error, OSError) and (error.errno is None or error.filename is not None):
            raise  # the error names its file, or does not come from the operating system
        # `path` itself may not exist. The nearest folder above it that exists is on the same disk.
        nearest_folder = next(folder for folder in path.absolute().parents if folder.exists())
        free_mib = shutil.disk_usage(nearest_folder).free / 2**20
        raise OSError(f"{path} cannot be written ({free_mib:.0f} MiB are free there): {error}") from error


def write_whole(path: Path, text: str) -> None:
    """Writes or replaces a small file atomically: a reader finds the old text or the new text, and never a part."""
    unfinished = path.with_name(path.name + ".tmp")
    with writing(unfinished):
        unfinished.write_text(text)
    os.replace(unfinished, path)


PROBE_LENGTH = 16
"""The number of tokens in the probe sequence."""
RANKS_FOLDER = "optimizer"
"""The subfolder with the optimizer state of ranks. Its safetensors files must not be beside the config, because engines
would load them as weights."""
_FOLDER_NAME = re.compile(r"step-(\d+)")
"""The name of a published folder, with its version."""
_STATE = "trainer.pt"
"""The file with optimizer and random state. It makes a published folder a training checkpoint."""
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
    is the tokenizer of the model or None. `probe`: the content of probe.json; None: generators cannot check the weights
    that they load, and warn. `weights` is the state dict to save; None: the model's own state dict at this moment.
    `facts`: facts about the model, for the manifest; None: `model_facts` of model and tokenizer. `frequencies`: the
    `frequency_facts`, for the manifest; None: the model leaves no choice of frequencies. `state`: the content of
    trainer.pt, which makes the folder a training checkpoint; None: the folder is none. `server_checkpoint`: the name of
    the server's checkpoint, for the manifest. `parts`: further files of the training checkpoint, which are moved into
    the folder: name in the folder -> (path now, checksum).

    The newest training checkpoint is never removed. Raises FileExistsError if the folder exists.
    """
    folder = directory.resolve() / f"step-{version}"
    if folder.exists():
        raise FileExistsError(f"{folder} exists: choose another output_dir, or continue that run with resume=True")
    unfinished = folder.with_name(folder.name + _UNFINISHED)
    shutil.rmtree(unfinished, ignore_errors=True)  # a killed run may have left it
    unfinished.mkdir(parents=True)
    # A copy of the dict, because save_pretrained removes tensors from its argument.
    state_dict = None if weights is None else dict(weights)
    with no_progress_bars():
        writer = writer_of(model)
        writer.save_pretrained(unfinished, state_dict=state_dict)
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
    # Name in the folder -> bytes, for every file so far. The manifest does not list itself: it is written last.
    sizes = {str(path.relative_to(unfinished)): path.stat().st_size for path in files}
    if facts is None:
        facts = model_facts(getattr(model, "config", None), tokenizer)
    manifest = {"version": version, "model": dict(facts), "files": sizes, "server_checkpoint": server_checkpoint}
    if frequencies:
        manifest["frequencies"] = dict(frequencies)
    checksums: dict[str, str] = {}
    for name in sizes:
        if name in parts:
            _, checksums[name] = parts[name]
        else:
            checksums[name] = checksum_of(unfinished / name)
    manifest["checksums"] = checksums
    (unfinished / MANIFEST).write_text(json.dumps(manifest, indent=1))
    if state is not None:  # a training checkpoint is flushed to the disk before its folder gets its name
        for path in [*unfinished.rglob("*"), unfinished]:
            to_disk(path)
    unfinished.rename(folder)
    if state is not None:
        to_disk(folder.parent)  # flushes the new name of the folder
    newest = published(directory)[-keep:]
    newest_checkpoint = saved(directory)[-1:]
    kept = {*newest, *newest_checkpoint}
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

    Other programs may read the folder while this function adds files to it. So existing files stay as they are, except
    the manifest. The manifest is replaced last, and the new files do not count until then.
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
    # The files are flushed to the disk before the manifest names them.
    for path in [*folder.rglob("*"), folder, folder.parent]:
        to_disk(path)
    (aside / MANIFEST).write_text(json.dumps(manifest, indent=1))
    to_disk(aside / MANIFEST)
    os.replace(aside / MANIFEST, folder / MANIFEST)
    to_disk(folder)
    aside.rmdir()


def published(directory: Path) -> list[Path]:
    """The complete folders in `directory`, oldest version first, as absolute paths."""
    manifests = directory.resolve().glob(f"step-*/{MANIFEST}")
    folders = [manifest.parent for manifest in manifests if _FOLDER_NAME.fullmatch(manifest.parent.name)]
    return sorted(folders, key=version_of)


def frequencies_of(folder: Path) -> dict[str, Any]:
    """The facts about the rotary frequencies (`frequency_facts`) in the manifest of a published folder.

    Empty: the model has only one set of rotary frequencies, or another trainer wrote the manifest.
    """
    found: dict[str, Any] = _manifest(folder).get("frequencies", {})
    return found


def saved(directory: Path) -> list[Path]:
    """The published folders with a training checkpoint in which no file is missing or has another size than the
    manifest says, oldest version first."""
    folders = []
    for folder in published(directory):
        files = _files(folder)
        if _STATE in files and _are_there(folder, files):
            folders.append(folder)
    return folders


def damaged(directory: Path) -> list[Path]:
    """The published folders in which a file is missing or has another size than the manifest says."""
    return [folder for folder in published(directory) if not _are_there(folder, _files(folder))]


def why_damaged(folder: Path, rank: int = 0, ranks: int = 1) -> str:
    """The message for a damaged file of a training checkpoint, with the remedy; empty: no file is damaged.

    A file is damaged if its bytes are not the bytes that were written. To find out, all bytes must be read, so the
    ranks share the files. `rank`, of `ranks`, checks every `ranks`-th file, from the file with the index `rank` on.
    """
    checksums = list(_manifest(folder)["checksums"].items())
    for name, checksum in checksums[rank::ranks]:
        if checksum_of(folder / name) != checksum:
            return (
                f"{folder / name} is damaged: its bytes are not what was written. Put a copy of that file in its "
                f"place, or move {folder.name} out of its folder to resume from the training checkpoint before it"
            )
    return ""


def version_of(folder: Path) -> int:
    """The policy version of a published folder, from its name. Raises ValueError if the name is not step-N."""
    match = _FOLDER_NAME.fullmatch(folder.name)
    if match is None:
        raise ValueError(f"{folder} is no folder of published weights: its name must be step-N")
    return int(match[1])


def load_weights(folder: Path, model: Any) -> dict[str, Any]:
    """Loads the state dict of a published folder, for a model of the class and dtype of `model`."""
    with no_progress_bars():
        saved_model = type(model).from_pretrained(
            folder,
            dtype=model.dtype,
            local_files_only=True,
            generation_config=GenerationConfig(),  # not that of the folder, which transformers may refuse
        )
    weights: dict[str, Any] = saved_model.state_dict()
    return weights


def load_state(folder: Path, *, mapped: bool = False) -> dict[str, Any]:
    """Loads the `state` of a training checkpoint. `mapped`: a tensor is read from the file only when it is used."""
    # `weights_only` lets the file hold tensors and plain containers, but no code.
    state: dict[str, Any] = torch.load(folder / _STATE, map_location="cpu", weights_only=True, mmap=mapped)
    return state


def probe_tokens(model: Any, tokenizer: Any = None) -> list[int]:
    """Random token ids, without the special tokens of the tokenizer. They are the same for every version of a model."""
    vocabulary = len(model.get_input_embeddings().weight)
    special: set[int] = set()
    if tokenizer is not None:
        vocabulary = min(vocabulary, len(tokenizer))  # engines refuse ids that exist only to pad the embedding
        special = set(tokenizer.all_special_ids)
    usable = sorted(set(range(vocabulary)) - special)
    return random.Random(0).choices(usable, k=PROBE_LENGTH)


def remove(folder: Path) -> None:
    """Removes the files of the manifest, and the files that a killed `add_state` left. If the folder is empty then, the
    folder is removed, too. Files that somebody else has put into the folder stay."""
    shutil.rmtree(folder.with_name(folder.name + _UNFINISHED), ignore_errors=True)
    listed = [folder / name for name in _files(folder)]
    # `add_state` puts these files into the folder before the manifest lists them.
    state_files = [folder / _STATE, *(folder / RANKS_FOLDER).glob("*")]
    for path in [*listed, *state_files]:
        path.unlink(missing_ok=True)
    # The manifest is removed after all other files. As long as it is there, the folder counts as published. So if this
    # process is killed before it has removed the manifest, the next call finishes the removal.
    (folder / MANIFEST).unlink()
    # The reverse order puts each folder behind the folders inside it.
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
    """The files that the manifest of a published folder lists: name in the folder -> size in bytes."""
    return dict(_manifest(folder)["files"])


def _are_there(folder: Path, files: dict[str, int]) -> bool:
    """True if each of `files` (name -> size in bytes) exists in the folder and has this size."""
    for name, size in files.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            return False
    return True


def why_other_tensors(stored: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> str:
    """The difference in names or shapes between stored tensors and the tensors of a model; "": there is none."""
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
    settings of the model at the start of the run.

    transformers does not write this file here, because it refuses to write settings that contradict each other, such as
    a temperature without do_sample. Many checkpoints have such settings.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        content = _loaded_generation_file(model)
        self.has_file = content is not None
        """True if the model was loaded with a generation_config.json, and still has the settings of this file."""
        self._generation_file = _own_generation_file(model) if content is None else content
        """The content of generation_config.json; None: the model cannot generate."""

    @property
    def config(self) -> Any:
        """The configuration of the model."""
        return self._model.config

    def save_pretrained(self, folder: str | os.PathLike[str], state_dict: Mapping[str, Tensor] | None = None) -> None:
        """Writes weights to a folder, as PreTrainedModel.save_pretrained does."""
        # transformers refuses to write some settings. So it writes an empty generation_config here, and the file is
        # replaced below. Only a shallow copy of the model gets the empty generation_config, because another thread may
        # be using the model.
        writable = object.__new__(type(self._model))
        writable.__dict__.update(self._model.__dict__)
        writable.generation_config = GenerationConfig()
        writable.save_pretrained(folder, state_dict=state_dict)
        file = Path(folder) / GENERATION_CONFIG_NAME
        if self._generation_file is not None:
            file.write_bytes(self._generation_file)
        else:
            file.unlink(missing_ok=True)  # transformers may have written the empty generation_config

    def go_on_from(self, folder: Path) -> None:
        """Lets `save_pretrained` write the generation_config.json of this published folder from now on, if the folder
        has this file."""
        with suppress(FileNotFoundError):
            self._generation_file = (folder / GENERATION_CONFIG_NAME).read_bytes()


def writer_of(model: Any) -> Any:
    """The object that saves `model` in published folders: a WholeModel, or `model` itself if it is no
    PreTrainedModel."""
    if isinstance(model, PreTrainedModel):
        return WholeModel(model)
    return model


def _loaded_generation_file(model: PreTrainedModel) -> bytes | None:
    """The content of the generation_config.json with which a model was loaded. None: there is no such file, or the
    settings of the model are no longer the settings of the file."""
    if not model.name_or_path or _generation_config_of(model) is None:  # a model without a name was made in code
        return None
    with suppress(OSError, ValueError):  # the file does not exist, or transformers cannot read it
        # If the model was loaded by a name on the hub, this is the file in the local cache.
        found = cached_file(model.name_or_path, GENERATION_CONFIG_NAME, local_files_only=True)
        if found is not None:
            file = Path(found)
            loaded = GenerationConfig.from_pretrained(file.parent)
            if _settings(loaded) == _settings(model.generation_config):
                return file.read_bytes()
    return None


def _own_generation_file(model: PreTrainedModel) -> bytes | None:
    """The content of a generation_config.json with the present settings of a model, also if transformers would refuse
    to write these settings. None: the model cannot generate."""
    config = _generation_config_of(model)
    if config is None:
        return None
    text: str = config.to_json_string(keys_to_pop=["compile_config"])  # transformers leaves this setting out, too
    return text.encode()


def _generation_config_of(model: PreTrainedModel) -> GenerationConfig | None:
    """The generation_config of a model; None: the model cannot generate."""
    return model.generation_config if model.can_generate() else None


def _settings(config: GenerationConfig) -> dict[str, Any]:
    """The settings that must be equal so that two configurations count as equal.

    The ids of the tokens for padding and for the beginning do not count, because TRL and many other programs set them
    in code.
    """
    settings: dict[str, Any] = json.loads(config.to_json_string(use_diff=False, ignore_metadata=True))
    settings.pop("pad_token_id", None)
    settings.pop("bos_token_id", None)
    return settings


class WithDelta:
    """Saves a model or an adapter in the dtype of the engines, together with the changes since the version before."""

    def __init__(self, model: Any, directory: Path, dtype: str) -> None:
        """`directory`: the folder with the published folders so far. `dtype`: the name of the dtype of the engines."""
        self._model = writer_of(model)
        self._directory = directory
        self._dtype = getattr(torch, dtype)

    @property
    def config(self) -> Any:
        """The configuration of the model."""
        return self._model.config

    def save_pretrained(self, folder: Path, state_dict: Mapping[str, Tensor]) -> None:
        """Writes weights to a folder, as PreTrainedModel.save_pretrained does, and beside them the changes since the
        version before."""
        # (Address, shape) -> tensor in the dtype of the engines. Tensors that share memory have the same address and
        # shape. So they get the same cast tensor, and still share memory.
        cast: dict[Any, Tensor] = {}
        for tensor in state_dict.values():
            key = (tensor.data_ptr(), tensor.shape)
            cast[key] = tensor.to(self._dtype) if tensor.is_floating_point() else tensor
        cast_dict = {name: cast[tensor.data_ptr(), tensor.shape] for name, tensor in state_dict.items()}
        self._model.save_pretrained(folder, state_dict=cast_dict)
        earlier = published(self._directory)
        if earlier:  # the first version has no version before it
            write_deltas(earlier[-1], folder)


WEIGHTS_FILE = "adapter_model.safetensors"
"""The file with the tensors of an adapter."""


class Adapter:
    """The active LoRA adapter of a peft model, which is trained, published and restored in the place of whole weights.

    A published folder holds `adapter_model.safetensors`, and `adapter_config.json` with the name of the base model. But
    with `merge_adapter` it holds whole weights: the base with the adapter added to it.
    """

    def __init__(self, model: Any, merged: bool) -> None:
        """`model` is a PeftModel. `merged` True: whole weights are published.

        Raises ValueError if the model has another kind of adapter, several active adapters, or no weights to train.
        With `merged`, raises ValueError if the adapter cannot be added to the base; without `merged`, if the base model
        has no name.
        """
        model.eval()  # LogprobModel calls `eval` only for the base, and not for the module of peft around it
        self.base: Any = model.get_base_model()
        """The transformers model. It computes with the adapter, because peft has put the layers of the adapter into
        it."""
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
        if base_name and Path(base_name).is_dir():  # without a name, Path("") would be the present folder
            # An absolute path, because a program that loads the adapter may run in another folder.
            base_name = str(Path(base_name).resolve())
        self._config.base_model_name_or_path = base_name

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
        """The facts that must be the same when a run is resumed, besides the `model_facts` of the base. Engines do not
        know these facts before they load the adapter."""
        return {"lora_rank": self._config.r, "lora_alpha": self._config.lora_alpha}

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the adapter, by their names in `adapter_model.safetensors`.

        If weights are not partitioned, these are the tensors that are being trained. Otherwise they are whole copies of
        these tensors, and all ranks must call this method together. The copies take little memory, because an adapter
        is small.
        """
        return {name: gather_full(tensor) for name, tensor in self._trained_tensors().items()}

    def _trained_tensors(self) -> dict[str, Tensor]:
        """The tensors that are being trained, by their names in `adapter_model.safetensors`. They are partitioned if
        the weights are partitioned."""
        from peft import get_peft_model_state_dict

        # `save_embedding_layers` is False because embeddings belong to the base. With its default, "auto", peft would
        # ask the hub whether the embeddings were resized.
        tensors: dict[str, Tensor] = get_peft_model_state_dict(
            self._model, adapter_name=self._name, save_embedding_layers=False
        )
        return tensors

    def weights(self) -> dict[str, Tensor]:
        """The tensors to publish: those of the adapter, or those of the base with the adapter added to it."""
        if self._whole is None:
            return self.tensors()
        # The adapter is added to a copy, because adding it to the base and taking it out again would change the base by
        # rounding.
        merged_model = copy.deepcopy(self._model).merge_and_unload()
        merged: dict[str, Tensor] = merged_model.state_dict()
        return merged

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Sets the tensors of the adapter, on all ranks.

        If the names or shapes of `tensors` are not those of this adapter, sets nothing, and raises a ValueError that
        names one of the tensors.
        """
        own = self._trained_tensors()
        difference = why_other_tensors(tensors, own)
        if difference:
            raise ValueError(difference)
        for name, tensor in own.items():
            saved_tensor = tensors[name].to(tensor.device)
            with torch.no_grad():
                if isinstance(tensor, DTensor):
                    distributed = distribute_tensor(saved_tensor, tensor.device_mesh, tensor.placements)
                    tensor.to_local().copy_(distributed.to_local())
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
            contiguous = tensor.contiguous()  # safetensors refuses tensors that are not contiguous
            # With peft's ensure_weight_tying two modules share a tensor, but safetensors refuses shared memory.
            is_shared = contiguous.data_ptr() in addresses
            separate[name] = contiguous.clone() if is_shared else contiguous
            addresses.add(contiguous.data_ptr())
        save_file(separate, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        self._config.save_pretrained(folder)

    def go_on_from(self, folder: Path) -> None:
        """Lets `save_pretrained` write the generation_config.json of this published folder from now on. Does nothing
        unless whole weights are published."""
        if self._whole is not None:
            self._whole.go_on_from(folder)

    def off(self) -> AbstractContextManager[None]:
        """A context in which the model computes without the adapter, as the base model."""
        context: AbstractContextManager[None] = self._model.disable_adapter()
        return context


def why_not_mergeable(model: Any) -> str:
    """The reason why the active adapter of a peft model cannot be added to its base, and the remedy; empty: it can.

    Two modules may share one weight, as the embedding and the output head of many models do. They still share one
    weight in the merged model. So an adapter must change both modules by the same parameters, or neither.
    """
    # id of a parameter -> its names. A shared weight has several names.
    names_by_id: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_by_id.setdefault(id(parameter), []).append(name)
    for names in names_by_id.values():
        # For each module with this weight, the ids of the adapter's parameters that change the module.
        changes = [_adapter_parameters(model, name) for name in names]
        if all(change == changes[0] for change in changes):  # always true for a weight that is not shared
            continue
        modules = [_name_in_base(name) for name in names]
        changed = [module for module, change in zip(modules, changes, strict=True) if change]
        how = f"changes {changed[0]} alone" if len(changed) == 1 else "changes each of them in its own way"
        return (
            f"{' and '.join(modules)} share one weight, and the adapter {how}, so no merged weight is right for both: "
            f"leave {' and '.join(changed)} out of the adapter's target_modules, modules_to_save and other settings"
        )
    return ""


def _adapter_parameters(model: Any, name: str) -> set[int]:
    """The ids of the parameters by which the active adapter changes a module of the base. `name`: the name of a
    parameter of this module in the peft model."""
    ids: set[int] = set()
    parts = name.split(".")
    for index, part in enumerate(parts):
        if part not in _WRAPPED:
            continue
        wrapper_name = ".".join(parts[:index])  # the name of the module of peft around this part
        wrapper = model.get_submodule(wrapper_name)
        for parameter_name, parameter in wrapper.named_parameters():
            # The name of a parameter of an adapter contains the name of this adapter.
            if set(parameter_name.split(".")) & set(model.active_adapters):
                ids.add(id(parameter))
    return ids


_WRAPPED = ("base_layer", "original_module")
"""The names under which peft's modules hold the module that they wrap."""
_ADDED_BY_PEFT = ("token_adapter", *_WRAPPED)
"""The parts that peft adds to the name of a module of the base."""


def _name_in_base(name: str) -> str:
    """The name that a module has in the base model, without the modules of peft around it. `name`: the name of a
    parameter of this module in the peft model."""
    *parts, _ = name.removeprefix("base_model.model.").split(".")  # the last part is the name inside of the module
    return ".".join(part for part in parts if part not in _ADDED_BY_PEFT)

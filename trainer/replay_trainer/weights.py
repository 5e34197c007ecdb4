"""Published weights: folders `step-N`. Generators load them, and a killed trainer resumes from them.

    <output_dir>/step-12/      config, safetensors and tokenizer, as save_pretrained writes them
                 generation_config.json  that of the model with which the run began, byte for byte
                 probe.json    log-probabilities of a fixed token sequence under these weights, to check a reload
                 trainer.pt    optimizer and random state: a run can resume from this folder (not every folder)
                 optimizer/    with partitioned weights, of a training checkpoint: each rank's rows of its state
                 delta/        what changed since the version before, for generators that fetch it (not every folder)
                 manifest.json version, files with their sizes and checksums, of which model the weights are, the
                               server's checkpoint; written last, so a folder with a manifest is complete, and a trainer
                               wrote it

* A folder gets its name when it is complete; one with a training checkpoint is on disk before that.
* Only files that a manifest names are removed, and what a killed trainer left that was adding a training checkpoint.
* A resume skips a state that lost a file or a part of one, and refuses one with other bytes than were written.
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
    """Raises an OSError that names `path` and the free space, in the place of one without a file.

    `kinds`: errors beside OSError that the block raises if it cannot write.
    """
    caught: tuple[type[Exception], ...] = (OSError, *kinds)
    try:
        yield
    except caught as error:
        if isinstance(error, OSError) and (error.errno is None or error.filename is not None):
            raise  # it says where, or is about something else
        there = next(folder for folder in path.absolute().parents if folder.exists())
        free = shutil.disk_usage(there).free / 2**20
        raise OSError(f"{path} cannot be written ({free:.0f} MiB are free there): {error}") from error


def write_whole(path: Path, text: str) -> None:
    """Writes a small file, in the place of what is there: a reader finds the old text or the new one."""
    unfinished = path.with_name(path.name + ".tmp")
    with writing(unfinished):
        unfinished.write_text(text)
    os.replace(unfinished, path)


PROBE_LENGTH = 16
"""Tokens in the probe sequence."""
RANKS_FOLDER = "optimizer"
"""A folder of its own: engines load every safetensors file beside the config as weights."""
_FOLDER = re.compile(r"step-(\d+)")
_STATE = "trainer.pt"
_UNFINISHED = ".tmp"


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
    """Write `directory`/step-`version` and return its path; keep the newest `keep` folders, remove older ones.

    `model` is a PreTrainedModel, or what writes one: a WholeModel, an Adapter or a WithDelta. `tokenizer` is its
    tokenizer or None, `weights` its state dict if it is not the model's own at this moment. Without a `probe`,
    generators cannot check what they load, and warn. `facts`: of which model the weights are; None: `model_facts` of
    model and tokenizer. `frequencies`: `frequency_facts`; None: nothing was to choose. `state` makes the folder a
    training checkpoint, the newest of which is never removed. `parts`: files of it to move into the folder, by their
    names in it, each with its checksum. Raises FileExistsError if the folder exists.
    """
    folder = directory.resolve() / f"step-{version}"
    if folder.exists():
        raise FileExistsError(f"{folder} exists: choose another output_dir, or continue that run with resume=True")
    unfinished = folder.with_name(folder.name + _UNFINISHED)
    shutil.rmtree(unfinished, ignore_errors=True)  # what a killed run left
    unfinished.mkdir(parents=True)
    with no_progress_bars():
        # save_pretrained takes tensors out of the dict that it gets.
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
    if state is not None:
        for path in [*unfinished.rglob("*"), unfinished]:
            to_disk(path)
    unfinished.rename(folder)
    if state is not None:
        to_disk(folder.parent)
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
    """Make a published folder a training checkpoint, as `publish_weights` does with these arguments.

    Others may read the folder meanwhile: what is in it stays. The manifest comes last, in the place of the one before;
    until then the new files count for nothing.
    """
    aside = folder.with_name(folder.name + _UNFINISHED)
    shutil.rmtree(aside, ignore_errors=True)  # what a killed run left
    aside.mkdir()
    torch.save(state, aside / _STATE)
    added = {_STATE: (aside / _STATE, checksum_of(aside / _STATE)), **(parts or {})}
    manifest = _manifest(folder) | {"server_checkpoint": server_checkpoint}
    for name, (path, checksum) in added.items():
        manifest["files"][name] = path.stat().st_size
        manifest["checksums"][name] = checksum
        (folder / name).parent.mkdir(exist_ok=True)
        path.rename(folder / name)
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
    """The error for a file of a training checkpoint with other bytes than were written, with the remedy; empty: none.

    Reads every byte of the files that this rank checks: every `ranks`-th one.
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
            generation_config=GenerationConfig(),  # only the weights are wanted, and its file may be refused
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
    """Remove the files of the manifest, what `add_state` leaves if it is killed, and the folder unless it holds other
    files."""
    shutil.rmtree(folder.with_name(folder.name + _UNFINISHED), ignore_errors=True)
    for path in [*(folder / name for name in _files(folder)), folder / _STATE, *(folder / RANKS_FOLDER).glob("*")]:
        path.unlink(missing_ok=True)
    # Last: if this process is killed here, the next one still finds the folder and finishes the removal.
    (folder / MANIFEST).unlink()
    for path in [*sorted((path for path in folder.rglob("*") if path.is_dir()), reverse=True), folder]:
        if not any(path.iterdir()):
            path.rmdir()


def to_disk(path: Path) -> None:
    """Flush the content of a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
    except ValueError as error:
        raise ValueError(f"{folder / MANIFEST} is damaged ({error}): move {folder.name} out of its folder") from error
    return manifest


def _files(folder: Path) -> dict[str, int]:
    """The files of the manifest, relative to the folder, with their sizes in bytes."""
    return dict(_manifest(folder)["files"])


def _are_there(folder: Path, files: dict[str, int]) -> bool:
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

    That is the file from which the model was loaded, byte for byte: the last version is what people deploy. If there is
    none, or somebody has changed the model's generation_config in code, it is what the model has at the start.
    transformers would write the file anew. It refuses to if one setting does not go with another, such as a temperature
    without do_sample, and many checkpoints have such settings.
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
        """Write weights to a folder, as PreTrainedModel.save_pretrained does."""
        # A shallow copy, which transformers can save: another thread may evaluate the model at this moment.
        writable = object.__new__(type(self._model))
        writable.__dict__.update(self._model.__dict__)
        writable.generation_config = GenerationConfig()
        writable.save_pretrained(folder, state_dict=state_dict)
        file = Path(folder) / GENERATION_CONFIG_NAME
        if self._generation_config is not None:
            file.write_bytes(self._generation_config)
        else:
            file.unlink(missing_ok=True)

    def go_on_from(self, folder: Path) -> None:
        """From now on write the generation_config.json of this published folder, if it has one."""
        with suppress(FileNotFoundError):
            self._generation_config = (folder / GENERATION_CONFIG_NAME).read_bytes()


def writer_of(model: Any) -> Any:
    """The object that saves `model` in published folders: a WholeModel, or `model` itself if it is no
    PreTrainedModel."""
    if isinstance(model, PreTrainedModel):
        return WholeModel(model)
    return model


def _generation_file_of(model: PreTrainedModel) -> bytes | None:
    """The generation_config.json from which a model was loaded; None: there is none, or the model says otherwise."""
    if not model.name_or_path or _generation_config_of(model) is None:
        return None
    # The file is not there, or holds what transformers cannot read.
    with suppress(OSError, ValueError):
        # Of a name on the hub, the file in the cache.
        found = cached_file(model.name_or_path, GENERATION_CONFIG_NAME, local_files_only=True)
        if found is not None:
            file = Path(found)
            loaded = GenerationConfig.from_pretrained(file.parent)
            if _settings(loaded) == _settings(model.generation_config):
                return file.read_bytes()
    return None


def _described(model: PreTrainedModel) -> bytes | None:
    """The content of generation_config.json as transformers writes it, for settings that it would not save too."""
    config = _generation_config_of(model)
    if config is None:
        return None
    text: str = config.to_json_string(keys_to_pop=["compile_config"])
    return text.encode()


def _generation_config_of(model: PreTrainedModel) -> GenerationConfig | None:
    return model.generation_config if model.can_generate() else None


def _settings(config: GenerationConfig) -> dict[str, Any]:
    """The settings that two configurations must have in common to count as the same.

    Without the tokens for padding and for the beginning: TRL and many programs set those in code for themselves.
    """
    settings: dict[str, Any] = json.loads(config.to_json_string(use_diff=False, ignore_metadata=True))
    settings.pop("pad_token_id", None)
    settings.pop("bos_token_id", None)
    return settings


class WithDelta:
    """Saves a model or an adapter in the dtype of the engines, and beside it what changed since the last version."""

    def __init__(self, model: Any, directory: Path, dtype: str) -> None:
        """`directory` has the versions before."""
        self._model = writer_of(model)
        self._directory = directory
        self._dtype = getattr(torch, dtype)

    @property
    def config(self) -> Any:
        """The configuration of the model."""
        return self._model.config

    def save_pretrained(self, folder: Path, state_dict: Mapping[str, Tensor]) -> None:
        """Write weights to a folder, as PreTrainedModel.save_pretrained does."""
        cast: dict[Any, Tensor] = {}  # tensors that share memory still do
        for tensor in state_dict.values():
            key = (tensor.data_ptr(), tensor.shape)
            cast[key] = tensor.to(self._dtype) if tensor.is_floating_point() else tensor
        named = {name: cast[tensor.data_ptr(), tensor.shape] for name, tensor in state_dict.items()}
        self._model.save_pretrained(folder, state_dict=named)
        earlier = published(self._directory)
        if earlier:
            write_deltas(earlier[-1], folder)


WEIGHTS_FILE = "adapter_model.safetensors"


class Adapter:
    """The active LoRA adapter of a peft model: trained, published and restored in the place of whole weights.

    A published folder then holds `adapter_config.json`, with the name of the base model, and
    `adapter_model.safetensors`. With `merge_adapter` it holds whole weights: the base with the adapter added to it.
    """

    def __init__(self, model: Any, merged: bool) -> None:
        """`model` is a PeftModel; `merged`: publish whole weights.

        Raises ValueError if the model has another kind of adapter, several active ones, no weights to train, if
        `merged` and the adapter cannot be added to the base, or, unless `merged`, if the base model has no name.
        """
        model.eval()  # LogprobModel does it for the base alone, which is inside
        self.base: Any = model.get_base_model()
        """The transformers model. peft has put the layers of the adapter into it, so it computes with the adapter."""
        self._model = model
        active = list(model.active_adapters)
        if len(active) != 1:
            raise ValueError(f"one adapter must be active, not {active}: call set_adapter")
        self._name: str = active[0]
        self._config = copy.copy(model.peft_config[self._name])
        kind = str(getattr(self._config.peft_type, "value", self._config.peft_type))
        if kind != "LORA":
            raise ValueError(f"GRPOTrainer trains LoRA adapters, and adapter {self._name!r} is {kind}")
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ValueError(f"no weight of adapter {self._name!r} is trainable: load it with is_trainable=True")
        self._config.inference_mode = True
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
        # A reader of the adapter may run in another folder.
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
        """The configuration of the base."""
        return self.base.config

    @property
    def facts(self) -> dict[str, Any]:
        """The facts that a resume must agree on beside the `model_facts` of the base. Engines do not know them
        beforehand."""
        return {"lora_rank": self._config.r, "lora_alpha": self._config.lora_alpha}

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the adapter, by their names in `adapter_model.safetensors`. They are those being trained.

        Where weights are partitioned, these are whole copies, which all ranks make together: an adapter is small.
        """
        return {name: gather_full(tensor) for name, tensor in self._own().items()}

    def _own(self) -> dict[str, Tensor]:
        """The tensors themselves, each partitioned if the weights are."""
        from peft import get_peft_model_state_dict

        # The embeddings are the base's. With "auto", peft would ask the hub whether they have been resized.
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
        """Set the tensors of the adapter, on all ranks.

        Raises ValueError that names one if their names or shapes are not those of this one. It sets nothing then.
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
        """Write `weights()` to a folder, as PreTrainedModel.save_pretrained does."""
        from safetensors.torch import save_file

        if self._whole is not None:
            self._whole.save_pretrained(folder, state_dict=dict(state_dict))
            return
        separate: dict[str, Tensor] = {}
        addresses: set[int] = set()
        for name, tensor in state_dict.items():
            contiguous = tensor.contiguous()
            # peft's ensure_weight_tying gives one tensor to two modules, and the format takes no shared memory.
            separate[name] = contiguous.clone() if contiguous.data_ptr() in addresses else contiguous
            addresses.add(contiguous.data_ptr())
        save_file(separate, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        self._config.save_pretrained(folder)

    def go_on_from(self, folder: Path) -> None:
        """From now on write the generation_config.json of this published folder, if these are whole weights."""
        if self._whole is not None:
            self._whole.go_on_from(folder)

    def off(self) -> AbstractContextManager[None]:
        """Inside, the model computes without the adapter: it is the base model."""
        context: AbstractContextManager[None] = self._model.disable_adapter()
        return context


def why_not_mergeable(model: Any) -> str:
    """Why the active adapter of a peft model cannot be added to its base, and the remedy; empty: it can.

    Two modules may share one weight: the embedding and the output head of many models do. The merged model has one
    weight there too. So an adapter must change both modules by the same parameters, or neither.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for shared in names.values():
        changes = [_adapter_parameters(model, name) for name in shared]
        if all(change == changes[0] for change in changes):
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
    found: set[int] = set()
    parts = name.split(".")
    for place, part in enumerate(parts):
        if part in _BASES:  # what is around it is peft's
            wrapper = model.get_submodule(".".join(parts[:place]))
            for own_name, parameter in wrapper.named_parameters():
                if set(own_name.split(".")) & set(model.active_adapters):
                    found.add(id(parameter))
    return found


_BASES = ("base_layer", "original_module")
"""The names that peft's modules give to what they are around."""
_OF_PEFT = ("token_adapter", *_BASES)


def _name_in_base(name: str) -> str:
    """The name in the base model of the module that has a parameter, without the modules of peft around it."""
    parts = name.removeprefix("base_model.model.").split(".")[:-1]
    return ".".join(part for part in parts if part not in _OF_PEFT)

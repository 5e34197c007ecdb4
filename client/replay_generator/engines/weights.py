"""Folders of weights that a trainer publishes: their contents, their checks, and the facts of their model.

Before an engine loads a folder, `check_folder` checks that its files are allowed, whole, and of the engine's model.
After the load, the engine's log-probabilities for a token sequence (`Probe`) must agree with those of the trainer. A
folder holds whole weights or a LoRA adapter.

A model is described by named facts, such as its sizes (`model_facts`). Two sides have the same model if they agree on
each fact that both know (`differing_facts`). Facts are compared in three places:

    check_folder       a generator compares its engine with each version, before the engine loads it
    why_other_model    a trainer compares its model with the generators that are connected
    a resume           a trainer compares its model with the training checkpoint that it continues
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from replay_client.errors import ReplayError
from replay_client.records import ClientInfo, read_described
from replay_client.settings import MOST_TEXT

_CHUNK_BYTES = 1 << 22
"""The number of bytes that `_is_finite` checks at a time. They fit into a processor's cache, which makes the check
several times faster."""
_MOST_HEADER = 100_000_000
"""The most bytes that the header of a safetensors file may have. The format has the same limit."""
_ADAPTER_CONFIG = "adapter_config.json"
_ADAPTER_WEIGHTS = "adapter_model.safetensors"
_HEAD = "lm_head.weight"
"""The tensor of the output head, which a checkpoint with tied embeddings may leave out."""
_EXPONENTS: dict[str, tuple[str, int]] = {
    "F64": ("<u8", 0x7FF0 << 48),
    "F32": ("<u4", 0x7F80 << 16),
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
}
"""Format of numbers in a safetensors file -> NumPy's type of integers of the same size, and the bits of the exponent.
If all of these bits are set, the number is an infinity or NaN. In all other numbers, at least one of them is 0."""


class WeightsNotAllowedError(ReplayError):
    """The newest weights are outside of the folder from which this generator may load."""


class WeightsDamagedError(ReplayError):
    """The newest weights have other tensors than the model, have NaN or infinities, or cannot be read."""


class WeightsMismatchError(ReplayError):
    """The newest weights are of another model, or the engine computes other log-probabilities with them than the
    trainer."""


def check_folder(
    folder: str,
    root: str | os.PathLike[str] | None,
    model: str | None,
    known: Set[str] = frozenset(),
    facts: Mapping[str, Any] | None = None,
) -> tuple[Probe | None, Set[str]]:
    """Checks a folder of weights. Returns its probe and the names of its tensors.

    The probe is None if the folder has none. The names are empty without a probe, and for an adapter.

    `root`: the folder that must contain all files; None: any. `model`: the folder that the engine started with; None:
    unknown. `known`: the names of the tensors of an earlier folder that has passed its probe; empty: there is none.
    `facts`: the `model_facts` of the engine.

    The values of the tensors are checked only if there is no probe. This check reads every file once, at some GB a
    second.

    Raises WeightsNotAllowedError if a file is outside of `root`, and WeightsMismatchError if the weights are of a model
    with other facts. Raises WeightsDamagedError if a file is no regular file, if the probe cannot be read, if the
    tensors are not those of the model, or if the check of the values finds infinities or NaN.
    """
    path = Path(folder)
    for file in _files(path):
        is_file_or_folder = file.is_file() or file.is_dir()
        if file.exists() and not is_file_or_folder:  # for example a pipe, whose reader would wait for ever
            raise WeightsDamagedError(f"{file} is no regular file, and is not opened: remove it")
    if root is not None:
        _check_inside(folder, root)
    # A tokenizer takes up to a second to load. So it is compared only until a version has passed its probe.
    _check_facts(folder, facts or {}, model, tokenizer=not known)
    probe = Probe.read(folder)
    # Name of a tensor -> its file, its first byte there, the byte after its last one, and its format.
    tensors: dict[str, tuple[Path, int, int, str]] = {}
    for file in sorted(path.glob("*.safetensors")):
        for name, (start, end, dtype) in _tensors(file).items():
            tensors[name] = (file, start, end, dtype)
    names: Set[str] = tensors.keys()
    is_adapter = (path / _ADAPTER_CONFIG).is_file()
    if is_adapter:
        names = frozenset()  # an adapter has other tensors than the model
    if names:
        _check_names(folder, names, model, known, probed=probe is not None)
    if probe is not None:
        return probe, names
    _check_finite(tensors)
    return None, frozenset()


def _check_facts(folder: str, engine_facts: Mapping[str, Any], model: str | None, *, tokenizer: bool) -> None:
    """Raises WeightsMismatchError if the model of a folder has other facts than the engine.

    `tokenizer`: see `folder_facts`.
    """
    found_facts = folder_facts(Path(folder), engine_facts, tokenizer=tokenizer)
    differing = differing_facts(found_facts, engine_facts)
    if differing:
        own = "the engine's" if model is None else f"the engine's, {model}"
        raise WeightsMismatchError(
            f"{folder} is of another model than {own}: {differing}; start generator and trainer with the same model "
            "and tokenizer (--model)"
        )


def _check_finite(tensors: Mapping[str, tuple[Path, int, int, str]]) -> None:
    """Raises WeightsDamagedError if a tensor holds NaN or an infinity.

    `tensors`: name of a tensor -> its file, its first byte there, the byte after its last one, and its format.
    """
    for name, (file, start, end, dtype) in tensors.items():
        if dtype in _EXPONENTS and not _is_finite(file, start, end, dtype):
            raise WeightsDamagedError(
                f"{file} holds NaN or infinity in {name!r}: the policy has broken down. Restart the trainer from an "
                "older version, with a lower learning rate"
            )


def _check_inside(folder: str, root: str | os.PathLike[str]) -> None:
    """Raises WeightsNotAllowedError unless the folder and all its files are below `root`, with links resolved."""
    allowed = Path(root).resolve()
    for file in [Path(folder), *_files(Path(folder))]:
        if not file.resolve().is_relative_to(allowed):
            link = "" if file == Path(folder) else f"; there, {file.name} leads to {file.resolve()}"
            raise WeightsNotAllowedError(
                f"its weights are in {folder!r}{link}, and this generator loads only from weights_root "
                f"{os.fspath(root)!r}. If they are the trainer's, start the generator with their folder as "
                "--weights-root; if not, find out which client set the policy version"
            )


def _check_names(folder: str, names: Set[str], model: str | None, known: Set[str], *, probed: bool) -> None:
    """Raises WeightsDamagedError if the tensors of a folder have wrong names.

    `known`: the names in an earlier folder that passed its probe. If there are such names, the folder must have the
    same names. If there are none, its names are compared with those in the engine's own `model` folder. If the names
    there cannot be read either, nothing is checked.

    `probed`: True if the folder has a probe. If `known` is empty, the names in such a folder may differ from those in
    the `model` folder, because other trainers write other names, and the probe shows whether the weights work. But if
    the folder has mostly right names and a few odd ones, the odd names are an error even with a probe.
    """
    own, optional = _own_names(model)
    wanted = known or own
    if not wanted:  # the names of the model are unknown
        return
    missing = wanted - names - optional
    odd = names - wanted - optional
    names_must_agree = bool(known) or not probed
    if missing and names_must_agree:
        raise WeightsDamagedError(
            f"{folder} lacks {min(missing)!r} ({len(missing)} of the tensors that {model} has), so the engine "
            "would go on with old ones. Let the trainer publish all weights, or a probe.json that shows that they work"
        )
    # If at least half of the names are odd, another trainer has chosen the names, and the probe decides.
    few_are_odd = 2 * len(odd) < len(names)
    if odd and (names_must_agree or few_are_odd):
        raise WeightsDamagedError(
            f"{folder} has {min(odd)!r} ({len(odd)} of its tensors), and {model} has no such tensor, so the engine "
            "would not use it. Let the trainer publish the weights of this model alone"
        )


def _tensors(file: Path) -> dict[str, tuple[int, int, str]]:
    """Reads the header of a safetensors file. Raises WeightsDamagedError if the file is not whole.

    Returns a dictionary: name of a tensor -> its first byte in the file, the byte after its last one, and its format.
    """
    size = file.stat().st_size
    # A safetensors file consists of 8 bytes with the length of the header, the header, and the data. The header has the
    # offsets of each tensor in the data.
    with file.open("rb") as content:
        length = int.from_bytes(content.read(8), "little")
        try:
            if length > min(size - 8, _MOST_HEADER):
                raise ValueError(f"its header of {length} bytes is cut off")
            header: dict[str, Any] = json.loads(content.read(length))
            header.pop("__metadata__", None)
            found: dict[str, tuple[int, int, str]] = {}
            data_start = 8 + length
            for name, entry in header.items():
                start_offset, end_offset = entry["data_offsets"]
                start = data_start + start_offset
                end = data_start + end_offset
                found[name] = (start, end, entry["dtype"])
                if not 0 <= start <= end <= size:
                    raise ValueError(f"it is cut off after {size} bytes")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise WeightsDamagedError(
                f"{file} is no whole safetensors file: {error}. Let the trainer write it anew"
            ) from error
    return found


def _is_finite(file: Path, start: int, end: int, dtype: str) -> bool:
    """True if the numbers in a file from byte `start` to byte `end` are neither infinities nor NaN.

    `dtype`: the format of the numbers, from `_EXPONENTS`.
    """
    # The file is read, and not mapped into memory: if somebody cut a mapped file short during the check, the operating
    # system would kill this process.
    integer_type, exponent_bits = _EXPONENTS[dtype]
    with file.open("rb") as content:
        content.seek(start)
        while start < end:
            chunk = content.read(min(_CHUNK_BYTES, end - start))
            if not chunk:  # the file was cut short during the check
                break
            start += len(chunk)
            count = len(chunk) // np.dtype(integer_type).itemsize
            integers = np.frombuffer(chunk, integer_type, count)  # the bits of the numbers
            exponents = integers & integers.dtype.type(exponent_bits)
            if (exponents == exponent_bits).any():  # a number with all exponent bits set is an infinity or NaN
                return False
    return True


def _own_names(model: str | None) -> tuple[Set[str], Set[str]]:
    """The names of a model's tensors (empty: unknown), and the names of tensors that published weights may leave out.

    `model`: the folder of the model; None: unknown.
    """
    folder = Path(model or "")
    names: set[str] = set()
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        for file in folder.glob("*.safetensors"):
            names.update(_tensors(file))
    except (OSError, ValueError, WeightsDamagedError):  # for example, the model is a name on the hub
        return set(), {_HEAD}
    optional: set[str] = set()
    if config.get("tie_word_embeddings", True):  # older versions of transformers do not write the default value
        optional.add(_HEAD)
    if "quantization_config" in config:  # a quantized model has other names than the weights that are trained
        return set(), optional
    return names, optional


def _files(folder: Path) -> Iterator[Path]:
    """Yields the files in a folder, its chat templates, and the files that its indices name.

    An index may name files outside of the folder. All files in the folder come before any index is opened, so that the
    caller can refuse an index that is a pipe.
    """
    if folder.is_dir():
        yield from sorted(folder.iterdir())
    yield from sorted((folder / _TEMPLATES).glob("*"))
    for index in folder.glob("*.index.json"):
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            names = {str(name) for name in weight_map.values()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue  # the engine raises an error about a damaged index
        for name in sorted(names):
            yield folder / name


@dataclass(frozen=True)
class Probe:
    """A token sequence with the trainer's log-probabilities, in `probe.json` beside the weights."""

    token_ids: list[int]
    logprobs: list[float]
    """(T - 1,) the log-probability of each token but the first, at temperature 1, in nats."""

    @classmethod
    def read(cls, folder: str) -> Probe | None:
        """The probe in a folder of weights; None if there is none. Raises WeightsDamagedError if it cannot be read."""
        path = Path(folder) / "probe.json"
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            token_ids = [int(token) for token in content["token_ids"]]
            logprobs = [float(logprob) for logprob in content["logprobs"]]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
            raise WeightsDamagedError(f"{path} must hold token_ids and logprobs: {error!r}") from error
        if len(token_ids) < 2 or len(logprobs) != len(token_ids) - 1:
            raise WeightsDamagedError(
                f"{path} has {len(token_ids)} token_ids and {len(logprobs)} logprobs; "
                "it needs at least two tokens and a log-probability for each but the first"
            )
        return cls(token_ids, logprobs)

    def max_difference(self, scores: list[float]) -> float:
        """The largest difference between an engine's log-probabilities and the trainer's, in nats.

        `scores` (T - 1,): the engine's log-probabilities. The result is NaN if one of them is NaN.
        """
        differences = np.asarray(scores) - np.asarray(self.logprobs)
        return float(np.abs(differences).max())


# -------------------------------------------------------------------------------------------------- models


MANIFEST = "manifest.json"
"""The name of the file in which our trainer describes a folder of weights. Its entry "model" has the `model_facts`."""
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_intermediate_size",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
)
_FACTS = {
    "model_type": "model_type",
    "vocabulary": "vocab_size",
    **{name: name for name in _SIZES},
}
"""Name of a fact -> its name in the configuration of a model. These facts decide the shapes of the model's tensors. No
model has all of them."""
_NAMING = ("model_type", "vocabulary", "tokenizer")
"""The facts by which people know a model."""
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
"""The files with the tokens of a tokenizer. From a folder without them, transformers would make an empty tokenizer."""
_TEMPLATES = "additional_chat_templates"
"""The subfolder for chat templates in the folder of a tokenizer. transformers loads them with the tokenizer."""


def model_facts(model: Any, tokenizer: Any) -> dict[str, Any]:
    """The known facts on which generator and trainer must agree.

    `model`: a configuration of transformers, a folder, or a name on the hub; None: the facts of the model are left out.

    The facts are model_type, vocabulary (the number of embeddings), the other sizes of `_FACTS`, and tokenizer. The
    fact tokenizer is a hash of the tokenizer's tokens and their ids, in 16 hexadecimal digits. Tokens that were added
    to the tokenizer's own vocabulary do not count, because a trainer may add one for padding.
    """
    facts: dict[str, Any] = {}
    config = _config_of(model) if isinstance(model, str) else model
    if hasattr(config, "get_text_config"):
        text_config = config.get_text_config()
        for fact, name in _FACTS.items():
            value = getattr(text_config, name, None)
            if isinstance(value, tuple):  # a value for each layer
                value = list(value)
            if isinstance(value, int | str | list) and value != "":
                facts[fact] = value
    with suppress(AttributeError, NotImplementedError):  # the tokenizer may be a user's own class, or None
        size = tokenizer.vocab_size
        tokens = sorted((token, token_id) for token, token_id in tokenizer.get_vocab().items() if token_id < size)
        tokens_json = json.dumps(tokens)
        facts["tokenizer"] = hashlib.sha256(tokens_json.encode()).hexdigest()[:16]
    return facts


def _config_of(model: str) -> Any:
    """The configuration of a model, which is a folder or a name on the hub; None: it cannot be read."""
    try:
        from transformers import AutoConfig, PretrainedConfig
    except ImportError:
        return None
    # Any client may have written the configuration, and a damaged configuration may raise any error.
    with suppress(Exception):
        return AutoConfig.from_pretrained(model, trust_remote_code=False)
    # The configuration may need code that comes with the model. No such code runs here, but the fields can be read.
    with suppress(Exception):
        fields, _ = PretrainedConfig.get_config_dict(model)
        return PretrainedConfig.from_dict(fields.get("text_config") or fields)
    return None


def folder_facts(folder: Path, wanted: Iterable[str], *, tokenizer: bool = True) -> dict[str, Any]:
    """The facts of the model whose weights are in `folder`, as far as its files have them.

    The facts are those in the folder's manifest. If another trainer has written the folder, there is no such manifest.
    Then the facts are read from the configuration and from the tokenizer in the folder, if it has them. Each of the two
    is read only if `wanted` names a fact that it has. `tokenizer` False: the tokenizer in such a folder is not read.
    """
    wanted = set(wanted)
    with suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
        facts = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["model"]
        if isinstance(facts, dict) and not wanted.isdisjoint(facts):  # it has at least one wanted fact
            return facts
    folder_tokenizer: Any = None
    if tokenizer and "tokenizer" in wanted and any((folder / name).is_file() for name in _VOCABULARIES):
        with suppress(Exception):  # a damaged tokenizer may raise any error
            from transformers import AutoTokenizer

            folder_tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    needs_config = bool(wanted - {"tokenizer"}) and (folder / "config.json").is_file()
    model = str(folder) if needs_config else None
    return model_facts(model, folder_tokenizer)


def folder_frequencies(folder: str) -> dict[str, Any]:
    """The trainer's `frequency_facts` in the manifest of a folder; empty: there are none."""
    with suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
        manifest = json.loads((Path(folder) / MANIFEST).read_text(encoding="utf-8"))
        frequencies = manifest["frequencies"]
        if isinstance(frequencies, dict) and all(type(value) is int for value in frequencies.values()):
            return frequencies
    return {}


def differing_facts(other_facts: Mapping[str, Any], own_facts: Mapping[str, Any]) -> str:
    """The facts that both sides know and that differ, each with both values, in words; "": none differ."""
    differing: list[str] = []
    for name, own_value in own_facts.items():
        other_value = other_facts.get(name, own_value)  # a fact that only one side knows does not differ
        if other_value != own_value:
            differing.append(f"{name} {other_value} (here {own_value})")
    return ", ".join(differing)


def load_causal_model(model: str, **options: Any) -> Any:
    """Loads a causal language model. `model`: a folder or a name on the hub. `options`: those of from_pretrained.

    No code that comes with a model is run, because published weights are data. Raises ValueError, with one sentence,
    for a model that transformers does not load as a text model. Also raises the OSErrors of transformers.
    """
    from transformers import AutoModelForCausalLM

    try:
        why = _why_not_causal(model)
        if why:
            raise ValueError(why)
        with no_progress_bars():
            return AutoModelForCausalLM.from_pretrained(model, trust_remote_code=False, **options)
    except ValueError as error:
        reason = " ".join(str(error).split())  # on one line
        raise ValueError(f"{model} cannot be loaded: {reason}") from error


def _why_not_causal(model: str) -> str:
    """The reason that transformers cannot load a model as a causal language model, with the remedy; "": none is known.

    The caller raises this reason instead of the error of transformers. That error would list all kinds of models that
    transformers loads, and name remedies that do not help here.
    """
    from transformers import (
        CONFIG_MAPPING,
        MODEL_FOR_CAUSAL_LM_MAPPING,
        AutoConfig,
        PreTrainedConfig,
        __version__,
    )

    if (Path(model) / _ADAPTER_CONFIG).is_file():
        return ""  # transformers loads the adapter on its base model
    fields, _ = PreTrainedConfig.get_config_dict(model)
    model_type = fields.get("model_type")
    config = None  # this version of transformers does not know the type
    if model_type is None or model_type in CONFIG_MAPPING:
        config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    if config is not None and type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return ""
    why = f"transformers {__version__} has no causal language model of the type {model_type!r}"
    if "AutoModelForCausalLM" in (fields.get("auto_map") or {}):  # code of the model's own would load it
        return f"{why}, and code that comes with a model is not run: take a type that transformers has"
    if config is None:
        return f"{why}: install a version that has it, or take a type that this one has"
    text_config = config.get_text_config()
    if text_config is not config and type(text_config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return (
            f"{why}: save its language model, of the type {text_config.model_type!r}, in a folder of its own and give "
            "that, or take a text model"
        )
    return f"{why}: take a text model, which predicts each token from those before it"


def end_ids(model: Any, tokenizer: Any) -> set[int]:
    """Tokens that end a completion, from the tokenizer and the model's generation settings."""
    tokens = [tokenizer.eos_token_id]
    if model.generation_config is not None:
        configured = model.generation_config.eos_token_id
        if isinstance(configured, list):
            tokens += configured
        else:
            tokens.append(configured)
    return {token for token in tokens if token is not None}


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Turns off transformers' progress bars until the end of the block.

    Otherwise transformers would draw a bar for each file over the display of the run.
    """
    from transformers.utils import logging

    were_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if were_enabled:
            logging.enable_progress_bar()


def told_facts(facts: Mapping[str, Any]) -> str:
    """The facts as JSON, with which a client describes its model to the server.

    The JSON has at most MOST_TEXT characters, so facts that do not fit are left out. The facts by which people know a
    model come first. The manifest of published weights has all facts.
    """
    fitting: dict[str, Any] = {}
    for name in (*_NAMING, *facts):
        if name in facts:
            longer = fitting | {name: facts[name]}
            if len(json.dumps(longer)) <= MOST_TEXT:
                fitting = longer
    return json.dumps(fitting)


def why_other_model(clients: Iterable[ClientInfo], own_facts: Mapping[str, Any]) -> str:
    """Why the trainer cannot train with one of the connected generators, and the remedy; "" if it can train with all.

    `clients`: the clients of the server. `own_facts`: the `model_facts` of the trainer.
    """
    for client in clients:
        settings = read_described(client.settings)
        other_facts = settings.get("model")
        if not client.open or client.ended:  # not connected
            continue
        if settings.get("part") != "generator" or not isinstance(other_facts, dict):
            continue
        if differing_facts(other_facts, own_facts):
            other = _in_words(other_facts, own_facts)
            own = _in_words(own_facts, other_facts)
            return (
                f"generator {client.name} has another model or tokenizer ({other}) than this trainer ({own}): start "
                f"both with the same one. The stored groups come from the generator's model: "
                f"`replay table reset --all` removes them"
            )
    return ""


def _in_words(facts: Mapping[str, Any], other_facts: Mapping[str, Any]) -> str:
    """Some of `facts` with their values, in words: those by which people know a model, and those that differ from
    `other_facts`."""
    parts: list[str] = []
    for name, value in facts.items():
        if name in _NAMING or other_facts.get(name, value) != value:
            parts.append(f"{name} {value}")
    return ", ".join(parts)


# ------------------------------------------------------------------------------------------------ adapters


def holds_adapter(folder: str | os.PathLike[str]) -> bool:
    """True if a folder of weights holds an adapter; False if it holds whole weights.

    Raises FileNotFoundError if the folder holds neither of them, or is gone.
    """
    names = {path.name for path in Path(folder).glob("*.safetensors")}
    if not names:
        raise FileNotFoundError(f"no *.safetensors in {os.fspath(folder)}")
    return _ADAPTER_WEIGHTS in names


def check_base(model: str) -> None:
    """Raises ValueError if `model` is a folder with an adapter, because an engine must start with a whole model."""
    if (Path(model) / _ADAPTER_CONFIG).is_file():
        raise ValueError(f"{model} holds an adapter: start the engine with its base model, which loads it then")


def read_adapter(folder: str) -> tuple[Any, dict[str, Any]]:
    """The configuration and the tensors of the adapter in `folder`, as peft takes them.

    Raises ModuleNotFoundError if peft is not installed, FileNotFoundError if a file is gone, and ValueError if the
    adapter is of another kind than LoRA.
    """
    try:
        from peft import LoraConfig, PeftConfig
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{folder} holds a LoRA adapter, and peft is not installed: pip install '.[lora]' in a clone of the "
            "repository"
        ) from error
    from safetensors.torch import load_file

    tensors = load_file(Path(folder) / _ADAPTER_WEIGHTS)
    if not (Path(folder) / _ADAPTER_CONFIG).is_file():
        raise FileNotFoundError(f"no {_ADAPTER_CONFIG} in {folder}")
    config = PeftConfig.from_pretrained(folder)
    if not isinstance(config, LoraConfig):
        raise ValueError(f"{folder} holds an adapter of kind {config.peft_type}, and engines load LoRA adapters alone")
    config.inference_mode = True
    return config, tensors

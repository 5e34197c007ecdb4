"""Folders of weights that a trainer publishes: what they hold, how they are checked, and of which model they are.

Before an engine loads them: where the files are, and whether they are whole and the model's (`check_folder`). After it:
`Probe`, a token sequence with the trainer's log-probabilities, which the engine's must equal. A folder holds whole
weights or a LoRA adapter.

Of which model a side is, it says by named facts (`model_facts`). Two sides agree if they agree on each fact that both
know (`differing_facts`). That is asked in three places:

    check_folder       a generator compares its engine with each version, before it loads it
    why_other_model    a trainer compares itself with the generators that are connected
    a resume           a trainer compares itself with the training checkpoint that it is to continue
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

_CHUNK = 1 << 22  # bytes; what fits a processor's cache is checked several times faster
_MOST_HEADER = 100_000_000  # bytes; the format has the same limit
_ADAPTER_CONFIG = "adapter_config.json"
_ADAPTER_WEIGHTS = "adapter_model.safetensors"
_HEAD = "lm_head.weight"
"""The output head, which a checkpoint with tied embeddings may leave out."""
# Integers of the size of each format, and the bits that are all set in infinities and NaN alone.
_EXPONENTS: dict[str, tuple[str, int]] = {
    "F64": ("<u8", 0x7FF0 << 48),
    "F32": ("<u4", 0x7F80 << 16),
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
}


class WeightsNotAllowedError(ReplayError):
    """The newest weights are outside of the folder from which this generator may load."""


class WeightsDamagedError(ReplayError):
    """The newest weights have other tensors than the model, hold no number where one must be, or cannot be read."""


class WeightsMismatchError(ReplayError):
    """The newest weights are of another model, or with them the engine computes other log-probabilities than the
    trainer."""


def check_folder(
    folder: str,
    root: str | os.PathLike[str] | None,
    model: str | None,
    known: Set[str] = frozenset(),
    facts: Mapping[str, Any] | None = None,
) -> tuple[Probe | None, Set[str]]:
    """The probe of a folder of weights, if it has one. Then also the names of its tensors, unless it is an adapter.

    `root`: see `_check_inside`. `model`: the folder that the engine started with; None: unknown. `known`: the names of
    the tensors of a folder that has passed its probe. `facts`: of the engine. Without a probe it reads every file once,
    at some GB a second.

    Raises WeightsNotAllowedError, WeightsMismatchError if the weights are of a model with other facts, and
    WeightsDamagedError if a file is no regular file, the probe cannot be read, the tensors are not those of the model,
    or, without a probe, hold infinities or NaN.
    """
    path = Path(folder)
    for file in _files(path):
        if file.exists() and not (file.is_file() or file.is_dir()):  # who opens a pipe waits for ever
            raise WeightsDamagedError(f"{file} is no regular file, and is not opened: remove it")
    if root is not None:
        _check_inside(folder, root)
    # A tokenizer that no manifest names takes up to a second to load. Once one has passed, later ones are not.
    if differing := differing_facts(folder_facts(path, facts or {}, tokenizer=not known), facts or {}):
        own = "the engine's" if model is None else f"the engine's, {model}"
        raise WeightsMismatchError(
            f"{folder} is of another model than {own}: {differing}; start generator and trainer with the same model "
            "and tokenizer (--model)"
        )
    probe = Probe.read(folder)
    tensors: dict[str, tuple[Path, int, int, str]] = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors |= {name: (file, *place) for name, place in _tensors(file).items()}
    names = frozenset() if (path / _ADAPTER_CONFIG).is_file() else tensors.keys()
    if names:
        _check_names(folder, names, model, known, probed=probe is not None)
    for name, (file, start, end, dtype) in tensors.items() if probe is None else ():
        if dtype in _EXPONENTS and not _finite(file, start, end, dtype):
            raise WeightsDamagedError(
                f"{file} holds NaN or infinity in {name!r}: the policy has broken down. Restart the trainer from an "
                "older version, with a lower learning rate"
            )
    return probe, names if probe is not None else frozenset()


def _check_inside(folder: str, root: str | os.PathLike[str]) -> None:
    """Raises WeightsNotAllowedError unless the folder and all its files are below `root`, links followed."""
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
    """Raises WeightsDamagedError if these are not the names of the model's tensors, or those that are `known`.

    Files of others may have other names, or tensors that nobody trains. Then a probe has to judge, once.
    """
    own, optional = _own_names(model)
    if not (wanted := known or own):
        return
    missing, odd = wanted - names - optional, names - wanted - optional
    if missing and (known or not probed):
        raise WeightsDamagedError(
            f"{folder} lacks {min(missing)!r} ({len(missing)} of the tensors that {model} has), so the engine "
            "would go on with old ones. Let the trainer publish all weights, or a probe.json that shows that they work"
        )
    if odd and (known or not probed or 2 * len(odd) < len(names)):
        raise WeightsDamagedError(
            f"{folder} has {min(odd)!r} ({len(odd)} of its tensors), and {model} has no such tensor, so the engine "
            "would not use it. Let the trainer publish the weights of this model alone"
        )


def _tensors(file: Path) -> dict[str, tuple[int, int, str]]:
    """Each tensor of a file: the bytes from and to which it lies there, and its format."""
    size = file.stat().st_size
    with file.open("rb") as content:
        length = int.from_bytes(content.read(8), "little")
        try:
            if length > min(size - 8, _MOST_HEADER):
                raise ValueError(f"its header of {length} bytes is cut off")
            header: dict[str, Any] = json.loads(content.read(length))
            header.pop("__metadata__", None)
            found = {
                name: (*(8 + length + offset for offset in entry["data_offsets"]), entry["dtype"])
                for name, entry in header.items()
            }
            if not all(0 <= start <= end <= size for start, end, _ in found.values()):
                raise ValueError(f"it is cut off after {size} bytes")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise WeightsDamagedError(
                f"{file} is no whole safetensors file: {error}. Let the trainer write it anew"
            ) from error
    return found


def _finite(file: Path, start: int, end: int, dtype: str) -> bool:
    # Not mapped: a file that is cut short meanwhile would end the process.
    kind, bits = _EXPONENTS[dtype]
    with file.open("rb") as content:
        content.seek(start)
        while start < end and (chunk := content.read(min(_CHUNK, end - start))):
            start += len(chunk)
            values = np.frombuffer(chunk, kind, len(chunk) // np.dtype(kind).itemsize)
            if ((values & values.dtype.type(bits)) == bits).any():
                return False
    return True


def _own_names(model: str | None) -> tuple[Set[str], Set[str]]:
    """The tensors of this model, none if its own files do not tell; and those that weights may have or leave out."""
    try:
        config = json.loads((Path(model or "") / "config.json").read_text(encoding="utf-8"))
        names = {name for file in Path(model or "").glob("*.safetensors") for name in _tensors(file)}
    except (OSError, ValueError, WeightsDamagedError):
        return set(), {_HEAD}
    tied = config.get("tie_word_embeddings", True)  # older versions do not write what is usual
    # A quantized model has other names than the weights that are trained.
    return set() if "quantization_config" in config else names, {_HEAD} if tied else set()


def _files(folder: Path) -> Iterator[Path]:
    """The files in a folder, and those that its indices name, before any index is opened. A name may lead out of it."""
    yield from sorted(folder.iterdir()) if folder.is_dir() else ()
    yield from sorted((folder / _TEMPLATES).glob("*"))
    for index in folder.glob("*.index.json"):
        try:
            names = {str(name) for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
        except (ValueError, KeyError, TypeError, AttributeError):
            continue  # the engine says what is wrong with it
        yield from (folder / name for name in sorted(names))


@dataclass(frozen=True)
class Probe:
    """A token sequence with the trainer's log-probabilities, in `probe.json` beside the weights."""

    token_ids: list[int]
    logprobs: list[float]
    """(T - 1,) of each token but the first, at temperature 1, in nats."""

    @classmethod
    def read(cls, folder: str) -> Probe | None:
        """The probe in a folder of weights; None if there is none. Raises WeightsDamagedError."""
        path = Path(folder) / "probe.json"
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            probe = cls([int(token) for token in content["token_ids"]], [float(lp) for lp in content["logprobs"]])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
            raise WeightsDamagedError(f"{path} must hold token_ids and logprobs: {error!r}") from error
        if len(probe.token_ids) < 2 or len(probe.logprobs) != len(probe.token_ids) - 1:
            raise WeightsDamagedError(
                f"{path} has {len(probe.token_ids)} token_ids and {len(probe.logprobs)} logprobs; "
                "it needs at least two tokens and a log-probability for each but the first"
            )
        return probe

    def max_difference(self, scores: list[float]) -> float:
        """Largest absolute difference between an engine's scores (T - 1,) and the trainer's, in nats; may be NaN."""
        return float(np.abs(np.asarray(scores) - np.asarray(self.logprobs)).max())


# -------------------------------------------------------------------------------------------------- models


MANIFEST = "manifest.json"
"""The file of a folder that says what a trainer of ours wrote. Under "model" it has the facts."""
_FACTS = {
    "model_type": "model_type",
    "vocabulary": "vocab_size",
    **{
        name: name
        for name in (
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
    },
}
"""Facts that stand in the configuration of a model, and their names there: what the shapes of its tensors follow from.
A model has some of them."""
_NAMING = ("model_type", "vocabulary", "tokenizer")
"""The facts that people know a model by."""
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
"""Files with the tokens of a tokenizer. Of a folder without them transformers would make an empty tokenizer."""
_TEMPLATES = "additional_chat_templates"
"""A folder in that of a tokenizer, whose files transformers reads with it."""


def model_facts(model: Any, tokenizer: Any) -> dict[str, Any]:
    """What generator and trainer must agree on, as far as it is known. `model`: its configuration, folder or name.

    model_type, vocabulary (embeddings), the other sizes of `_FACTS`, and tokenizer: 16 hexadecimal digits of its tokens
    and their ids. Tokens that were added behind its vocabulary do not count, because a trainer may add one for padding.
    """
    facts: dict[str, Any] = {}
    config = _config_of(model) if isinstance(model, str) else model
    if hasattr(config, "get_text_config"):
        text_config = config.get_text_config()
        for fact, name in _FACTS.items():
            value = getattr(text_config, name, None)
            if isinstance(value, tuple):  # one for each layer
                value = list(value)
            if isinstance(value, int | str | list) and value != "":
                facts[fact] = value
    with suppress(AttributeError, NotImplementedError):  # somebody's own tokenizer, or none
        size = tokenizer.vocab_size
        tokens = sorted(each for each in tokenizer.get_vocab().items() if each[1] < size)
        facts["tokenizer"] = hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16]
    return facts


def _config_of(model: str) -> Any:
    """The configuration in a folder, or of a name on the hub; None: it is not on this machine, or damaged."""
    try:
        from transformers import AutoConfig, PretrainedConfig
    except ImportError:
        return None
    # Anybody may have written it, and what is damaged raises anything.
    with suppress(Exception):
        return AutoConfig.from_pretrained(model, trust_remote_code=False)
    # Perhaps it needs code that comes with the model. No such code runs here, but its fields can be read.
    with suppress(Exception):
        fields, _ = PretrainedConfig.get_config_dict(model)
        return PretrainedConfig.from_dict(fields.get("text_config") or fields)
    return None


def folder_facts(folder: Path, wanted: Iterable[str], *, tokenizer: bool = True) -> dict[str, Any]:
    """The facts of the model whose weights are in `folder`, as far as the folder tells.

    Those of its manifest. A folder of another trainer has no such manifest, but perhaps a configuration and, unless it
    is not to be read, a tokenizer. Only facts that are `wanted` are looked for there.
    """
    wanted = set(wanted)
    with suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
        facts = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["model"]
        if isinstance(facts, dict) and not wanted.isdisjoint(facts):
            return facts
    own: Any = None
    if tokenizer and "tokenizer" in wanted and any((folder / name).is_file() for name in _VOCABULARIES):
        with suppress(Exception):  # a damaged one raises anything
            from transformers import AutoTokenizer

            own = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    has_config = bool(wanted - {"tokenizer"}) and (folder / "config.json").is_file()
    return model_facts(str(folder) if has_config else None, own)


def folder_frequencies(folder: str) -> dict[str, Any]:
    """What the manifest of a folder says of the trainer's `frequency_facts`; empty: nothing."""
    with suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
        frequencies = json.loads((Path(folder) / MANIFEST).read_text(encoding="utf-8"))["frequencies"]
        if isinstance(frequencies, dict) and all(type(value) is int for value in frequencies.values()):
            return frequencies
    return {}


def differing_facts(other_facts: Mapping[str, Any], own_facts: Mapping[str, Any]) -> str:
    """The facts that both sides know and that differ, each with both values, in words; "": none."""
    return ", ".join(
        f"{name} {other_facts[name]} (here {own_facts[name]})"
        for name in own_facts
        if other_facts.get(name, own_facts[name]) != own_facts[name]
    )


def load_causal_model(model: str, **options: Any) -> Any:
    """The causal language model in a folder, or of a name on the hub. `options`: those of from_pretrained.

    No code that comes with a model is run: published weights are data. Raises ValueError, in one sentence, for a model
    that transformers does not load as text, and OSError as transformers does.
    """
    from transformers import AutoModelForCausalLM

    try:
        if why := _why_not_causal(model):
            raise ValueError(why)
        with no_progress_bars():
            return AutoModelForCausalLM.from_pretrained(model, trust_remote_code=False, **options)
    except ValueError as error:
        raise ValueError(f"{model} cannot be loaded: {' '.join(str(error).split())}") from error


def _why_not_causal(model: str) -> str:
    """Why transformers does not load a model as a causal language model, and what to do; empty: it may.

    It would say so itself, with a list of all the kinds that it loads, and with remedies that are not those here.
    """
    from transformers import (
        CONFIG_MAPPING,
        MODEL_FOR_CAUSAL_LM_MAPPING,
        AutoConfig,
        PreTrainedConfig,
        __version__,
    )

    if (Path(model) / _ADAPTER_CONFIG).is_file():
        return ""  # transformers loads it on its base
    described, _ = PreTrainedConfig.get_config_dict(model)
    kind = described.get("model_type")
    known = kind is None or kind in CONFIG_MAPPING
    config = AutoConfig.from_pretrained(model, trust_remote_code=False) if known else None
    if config is not None and type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return ""
    why = f"transformers {__version__} has no causal language model of the type {kind!r}"
    if "AutoModelForCausalLM" in (described.get("auto_map") or {}):
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
    configured = model.generation_config.eos_token_id if model.generation_config is not None else None
    listed = configured if isinstance(configured, list) else [configured]
    return {token for token in (*listed, tokenizer.eos_token_id) if token is not None}


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Inside, transformers draws none: it would draw one for each file, over the display of the run."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def told_facts(facts: Mapping[str, Any]) -> str:
    """JSON of facts, for what a client says of itself to the server: those that fit into MOST_TEXT characters.

    What names a model comes first. The others stand in each manifest.
    """
    fitting: dict[str, Any] = {}
    for name in (*_NAMING, *facts):
        if name in facts:
            longer = fitting | {name: facts[name]}
            fitting = longer if len(json.dumps(longer)) <= MOST_TEXT else fitting
    return json.dumps(fitting)


def why_other_model(clients: Iterable[ClientInfo], own_facts: Mapping[str, Any]) -> str:
    """Why a trainer with these `model_facts` refuses a connected generator, by what both say; empty: it does not."""
    for client in clients:
        settings = read_described(client.settings)
        other_facts = settings.get("model")
        if not client.open or client.ended or settings.get("part") != "generator" or not isinstance(other_facts, dict):
            continue
        if differing_facts(other_facts, own_facts):
            its, own = _in_words(other_facts, own_facts), _in_words(own_facts, other_facts)
            return (
                f"generator {client.name} has another model or tokenizer ({its}) than this trainer ({own}): start both "
                f"with the same one. Groups that are stored are of the generator's: `replay table reset --all` removes "
                f"them"
            )
    return ""


def _in_words(facts: Mapping[str, Any], others: Mapping[str, Any]) -> str:
    """What names a model, and of its other facts those that `others` has otherwise."""
    parts = [f"{name} {value}" for name, value in facts.items() if name in _NAMING or others.get(name, value) != value]
    return ", ".join(parts)


# ------------------------------------------------------------------------------------------------ adapters


def holds_adapter(folder: str | os.PathLike[str]) -> bool:
    """Returns whether a folder of weights holds an adapter, and not whole weights.

    Raises FileNotFoundError if it holds neither, or is gone.
    """
    names = {path.name for path in Path(folder).glob("*.safetensors")}
    if not names:
        raise FileNotFoundError(f"no *.safetensors in {os.fspath(folder)}")
    return _ADAPTER_WEIGHTS in names


def check_base(model: str) -> None:
    """Raises ValueError if `model`, which an engine is to start with, is a folder with an adapter."""
    if (Path(model) / _ADAPTER_CONFIG).is_file():
        raise ValueError(f"{model} holds an adapter: start the engine with its base model, which loads it then")


def read_adapter(folder: str) -> tuple[Any, dict[str, Any]]:
    """The configuration and the tensors of the adapter in `folder`, as peft takes them.

    Raises ModuleNotFoundError without peft, FileNotFoundError if a file is gone, ValueError for another kind of
    adapter than LoRA.
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

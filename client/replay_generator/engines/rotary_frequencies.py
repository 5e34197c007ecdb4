"""Rotary frequencies that depend on a length: chooses them once, for the length that engines serve.

transformers chooses them anew in each forward pass, from the longest sequence in it. So the log-probabilities of a
sequence would depend on the other sequences of its micro-batch. vLLM chooses once, when it starts, and trainer and
engines here follow its rule:

    longrope    the long factors if max_model_len > original_max_position_embeddings, else the short ones.
                By default max_model_len is the original length.
    dynamic     always those of the base that the configuration names; vLLM's table ends at max_position_embeddings

(vllm/model_executor/layers/rotary_embedding/phi3_long_rope_scaled_rope.py and dynamic_ntk_scaling_rope.py;
vllm/config/model.py, _get_and_verify_max_len.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

LONGROPE = ("longrope", "su")
"""The kind of frequencies with long factors: its present name, and its first one."""
_FEW = 8
"""The number of positions in the check of a rotary module."""


@dataclass(frozen=True)
class Rope:
    """The rule by which the frequencies of one model follow from a length."""

    long_from: int | None
    """The long factors belong to lengths above this one; None: the model has no long factors."""
    most: int | None
    """The most tokens that the model can be served with; None: the frequencies set no limit."""

    @classmethod
    def of(cls, config: Any) -> Rope | None:
        """The rule of the model of this configuration; None: its frequencies depend on no length.

        Raises ValueError for parameters that vLLM reads and transformers does not.
        """
        text = config.get_text_config()
        long_from = None
        most = None
        for parameters in _parameters_of(text):
            kind = _kind_of(parameters)
            if kind in LONGROPE:
                long_from = _original_length(text, parameters)
            elif "dynamic" in kind:
                if "max_trained_positions" in parameters:
                    raise ValueError(
                        f"{text.model_type} has dynamic frequencies with max_trained_positions = "
                        f"{parameters['max_trained_positions']}, which vLLM uses and transformers does not: remove it "
                        "from the model's rope_parameters, or take another model"
                    )
                most = int(text.max_position_embeddings)
        if long_from is None and most is None:
            return None
        return cls(long_from, most)

    def default_length(self, config: Any) -> int:
        """The most tokens of a sequence if no setting has another number."""
        if self.long_from is None:
            assert self.most is not None
            return self.most
        # vLLM looks for the original length only beside the parameters, and otherwise takes the whole length.
        text = config.get_text_config()
        original = getattr(text, "original_max_position_embeddings", None)
        return int(original or text.max_position_embeddings)

    def is_long(self, length: int) -> bool:
        """True if a model that serves up to `length` tokens takes the long factors."""
        return self.long_from is not None and length > self.long_from


def default_length(config: Any) -> int | None:
    """The most tokens of a sequence if no setting has another number; None: the frequencies depend on no length."""
    rope = Rope.of(config)
    if rope is None:
        return None
    return rope.default_length(config)


def fix_frequencies(model: Any, max_length: int | None) -> int | None:
    """Chooses the frequencies of `model` for sequences of up to `max_length` tokens; None: the default length.

    From then on they are the same in every forward pass, for any lengths. Call it for each model that is built. Returns
    the length that decided; None: the frequencies depend on none, and nothing was changed.

    Raises ValueError if the model cannot be served with that length, or computes other frequencies all the same.
    """
    rope = Rope.of(model.config)
    if rope is None:
        return None
    length = rope.default_length(model.config) if max_length is None else max_length
    name = model.config.get_text_config().model_type
    if rope.most is not None and length > rope.most:
        raise ValueError(
            f"max_length = {length} is more than {name} has frequencies for: they are dynamic, and vLLM computes those "
            f"of {rope.most} positions (max_position_embeddings): set max_length to {rope.most} or less"
        )
    for module in model.modules():
        for part in _parts_of(module):
            part.fix(rope.is_long(length))
            if part.follows_the_longest(length):
                raise ValueError(
                    f"transformers computes the frequencies of {name} from the longest sequence of a micro-batch, and "
                    f"they cannot be held for max_length = {length}: set max_length to {rope.long_from or rope.most} "
                    "or less, or take another model"
                )
    return length


def frequency_facts(config: Any, length: int | None) -> dict[str, Any]:
    """The chosen frequencies, as facts for the manifest of published weights; empty: there was no choice.

    `length`: the result of `fix_frequencies`.
    """
    rope = Rope.of(config)
    if rope is None or length is None or rope.long_from is None:
        return {}
    return {"max_length": length, "original_length": rope.long_from}


def why_other_frequencies(facts: Mapping[str, Any], served: int) -> str:
    """The reason that an engine for `served` tokens has other frequencies than the trainer; empty: it has the same.

    `facts`: those of `frequency_facts` in the manifest; empty: the model has no choice, or another trainer wrote it.
    """
    if "max_length" not in facts or "original_length" not in facts:
        return ""
    length = facts["max_length"]
    original = facts["original_length"]
    if (served > original) == (length > original):
        return ""
    return (
        f"the engine serves sequences of up to {served} tokens, and the trainer has max_length = {length}: above "
        f"{original} tokens (original_max_position_embeddings) the model computes with other frequencies. Give both "
        "the same max_length (--engine-arg max_length=..., max_length of the trainer, --max-model-len of vllm serve)"
    )


def _parameters_of(text: Any) -> list[Mapping[str, Any]]:
    """The parameters of the frequencies, one mapping for each type of layer that has its own."""
    found = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None)
    if not isinstance(found, Mapping):
        return []
    nested = [parameters for parameters in found.values() if isinstance(parameters, Mapping)]
    return nested or [found]


def _kind_of(parameters: Mapping[str, Any]) -> str:
    return str(parameters.get("rope_type") or parameters.get("type") or "default")


def _original_length(text: Any, parameters: Mapping[str, Any]) -> int:
    """The length for which the model was trained before its frequencies were extended."""
    beside_parameters = getattr(text, "original_max_position_embeddings", None)
    in_parameters = parameters.get("original_max_position_embeddings")
    return int(beside_parameters or in_parameters or text.max_position_embeddings)


@dataclass(frozen=True)
class _Part:
    """The frequencies of one rotary module, or of one of its types of layers."""

    module: Any
    layer_type: str | None
    """The type of layer; None: the module has one set of frequencies."""
    kind: str

    def fix(self, long: bool) -> None:
        """Chooses the frequencies, and keeps transformers from choosing others in a forward pass."""
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        module = self.module
        name = "inv_freq" if self.layer_type is None else f"{self.layer_type}_inv_freq"
        if self.kind in LONGROPE:
            parameters = _parameters_of_layers(module.config, self.layer_type)
            original = _original_length(module.config, parameters)
            device = getattr(module, name).device
            choose = ROPE_INIT_FUNCTIONS["longrope"]
            # Any length above the original one chooses the long factors.
            seq_len = original + 1 if long else None
            chosen, _ = choose(module.config, device, seq_len=seq_len, **self._layer_argument)
            setattr(module, name, chosen)
        # transformers never computes frequencies of the kind "default" again.
        if self.layer_type is None:
            module.rope_type = "default"
        else:
            module.rope_type = {**module.rope_type, self.layer_type: "default"}

    def follows_the_longest(self, length: int) -> bool:
        """True if the rotations of the first positions change when the row also has the last of `length` positions."""
        import torch

        few = min(_FEW, length)
        in_short_row = self._rotations(few, few)
        in_long_row = self._rotations(few, max(length - 1, few))
        pairs = zip(in_short_row, in_long_row, strict=True)
        return not all(torch.equal(short, long) for short, long in pairs)

    def _rotations(self, few: int, last: int) -> list[torch.Tensor]:
        """The rotations of the first `few` positions, in a row that ends with the position `last`."""
        import torch  # not above: a generator without torch reads manifests with this module

        buffer = next(self.module.buffers())
        hidden = torch.zeros(1, device=buffer.device)
        positions = torch.tensor([[*range(few), last]], device=buffer.device)
        rotated = self.module(hidden, positions, **self._layer_argument)
        parts = rotated if isinstance(rotated, tuple) else (rotated,)
        return [part[:, :few] for part in parts]

    @property
    def _layer_argument(self) -> dict[str, Any]:
        """The argument that names the type of layer to transformers."""
        if self.layer_type is None:
            return {}
        return {"layer_type": self.layer_type}


def _parts_of(module: Any) -> Iterator[_Part]:
    """The frequencies of a rotary module that depend on a length; none of any other module."""
    kinds = getattr(module, "rope_type", None)
    config = getattr(module, "config", None)
    if kinds is None or config is None:
        return
    layer_types: list[str | None] = list(kinds) if isinstance(kinds, Mapping) else [None]
    for layer_type in layer_types:
        kind = _kind_of(_parameters_of_layers(config, layer_type))
        if kind in LONGROPE or "dynamic" in kind:
            yield _Part(module, layer_type, kind)


def _parameters_of_layers(config: Any, layer_type: str | None) -> Mapping[str, Any]:
    """The parameters of the frequencies of one type of layer; empty: there are none."""
    if layer_type is None:
        found = _parameters_of(config)
        return found[0] if found else {}
    own: Mapping[str, Any] = config.rope_parameters[layer_type]
    return own

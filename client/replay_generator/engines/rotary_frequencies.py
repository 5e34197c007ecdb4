"""Chooses rotary frequencies that depend on a length. Chooses them once for a model, for the length that is served.

transformers chooses the frequencies anew in each forward pass, by the longest sequence in that pass. So the
log-probabilities of a sequence would depend on the other sequences of its micro-batch. vLLM chooses the frequencies
once, when it starts. The trainer and the engines here follow vLLM's rule:

    longrope    the long factors if max_model_len > original_max_position_embeddings, otherwise the short ones.
                By default max_model_len is the original length.
    dynamic     always the frequencies of the configured base (rope_theta), whatever the length. vLLM's table of
                rotations ends at max_position_embeddings, so no longer sequence can be served.

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
"""The present and the older name of the kind of frequencies that has long factors."""
_COMPARED_POSITIONS = 8
"""The number of first positions whose rotations are compared to check a rotary module."""


@dataclass(frozen=True)
class Rope:
    """The rule by which the frequencies of one model follow from a length."""

    long_from: int | None
    """The model takes its long factors for lengths above this length; None: the model has no long factors."""
    most: int | None
    """The greatest length that can be served with these frequencies; None: the frequencies set no limit."""

    @classmethod
    def of(cls, config: Any) -> Rope | None:
        """The rule for the model with this configuration; None: its frequencies depend on no length.

        Raises ValueError for parameters that vLLM reads and transformers does not.
        """
        text_config = config.get_text_config()
        long_from = None
        most = None
        for parameters in _parameters_of(text_config):
            kind = _kind_of(parameters)
            if kind in LONGROPE:
                long_from = _original_length(text_config, parameters)
            elif "dynamic" in kind:
                if "max_trained_positions" in parameters:
                    raise ValueError(
                        f"{text_config.model_type} has dynamic frequencies with max_trained_positions = "
                        f"{parameters['max_trained_positions']}, which vLLM uses and transformers does not: remove it "
                        "from the model's rope_parameters, or take another model"
                    )
                most = int(text_config.max_position_embeddings)
        if long_from is None and most is None:
            return None
        return cls(long_from, most)

    def default_length(self, config: Any) -> int:
        """The most tokens of a sequence if no setting names a length."""
        if self.long_from is None:
            assert self.most is not None  # a rule has at least one of the two
            return self.most
        # vLLM reads this default from the configuration itself, and not from the parameters of the frequencies inside
        # it. If the configuration itself lacks the original length, vLLM takes the whole length.
        text_config = config.get_text_config()
        original = getattr(text_config, "original_max_position_embeddings", None)
        return int(original or text_config.max_position_embeddings)

    def is_long(self, length: int) -> bool:
        """True if a model that serves up to `length` tokens takes the long factors."""
        return self.long_from is not None and length > self.long_from


def default_length(config: Any) -> int | None:
    """The most tokens of a sequence if no setting names a length; None: the frequencies depend on no length."""
    rope = Rope.of(config)
    if rope is None:
        return None
    return rope.default_length(config)


def fix_frequencies(model: Any, max_length: int | None) -> int | None:
    """Chooses the frequencies of `model` for sequences of up to `max_length` tokens; None: the default length.

    Afterwards the frequencies are the same in every forward pass, whatever the lengths of its sequences. Call this for
    each model that is built. Returns the length by which the frequencies were chosen. Returns None if the frequencies
    depend on no length; then the model is unchanged.

    Raises ValueError if the model cannot be served with that length, or if transformers would still choose the
    frequencies by the longest sequence of a forward pass.
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
        for frequency_set in _frequency_sets_of(module):
            frequency_set.fix(long=rope.is_long(length))
            if frequency_set.depends_on_row(length):
                raise ValueError(
                    f"transformers computes the frequencies of {name} from the longest sequence of a micro-batch, and "
                    f"they cannot be held for max_length = {length}: set max_length to {rope.long_from or rope.most} "
                    "or less, or take another model"
                )
    return length


def frequency_facts(config: Any, length: int | None) -> dict[str, Any]:
    """Facts about the choice of frequencies, by name, for the manifest of published weights; {}: there was no choice.

    `length`: the result of `fix_frequencies`.
    """
    rope = Rope.of(config)
    if rope is None or length is None or rope.long_from is None:
        return {}
    return {"max_length": length, "original_length": rope.long_from}


def why_other_frequencies(facts: Mapping[str, Any], served: int) -> str:
    """The reason that an engine for `served` tokens has other frequencies than the trainer; "": they are the same.

    `facts`: the result of `frequency_facts`, from the manifest. It is empty if the model leaves no choice, or if
    another trainer wrote the manifest.
    """
    if "max_length" not in facts or "original_length" not in facts:
        return ""
    length = facts["max_length"]
    original = facts["original_length"]
    both_long_or_both_short = (served > original) == (length > original)
    if both_long_or_both_short:
        return ""
    return (
        f"the engine serves sequences of up to {served} tokens, and the trainer has max_length = {length}: above "
        f"{original} tokens (original_max_position_embeddings) the model computes with other frequencies. Give both "
        "the same max_length (--engine-arg max_length=..., max_length of the trainer, --max-model-len of vllm serve)"
    )


def _parameters_of(text_config: Any) -> list[Mapping[str, Any]]:
    """The parameters of the frequencies: one mapping for each type of layer, or one for all layers; []: none."""
    configured = getattr(text_config, "rope_parameters", None)
    if not configured:
        configured = getattr(text_config, "rope_scaling", None)  # the older name
    if not isinstance(configured, Mapping):
        return []
    mappings = [value for value in configured.values() if isinstance(value, Mapping)]  # one for each type of layer
    if mappings:
        return mappings
    return [configured]


def _kind_of(parameters: Mapping[str, Any]) -> str:
    """The kind of frequencies, such as "longrope". Older configurations have it under the name "type"."""
    return str(parameters.get("rope_type") or parameters.get("type") or "default")


def _original_length(text_config: Any, parameters: Mapping[str, Any]) -> int:
    """The length for which the model was trained before its frequencies were extended."""
    in_config = getattr(text_config, "original_max_position_embeddings", None)
    in_parameters = parameters.get("original_max_position_embeddings")
    return int(in_config or in_parameters or text_config.max_position_embeddings)


@dataclass(frozen=True)
class _FrequencySet:
    """A set of frequencies of a rotary module. A module has one set for all layers, or one for each type of layer."""

    module: Any
    layer_type: str | None
    """The type of layer that uses the set; None: all layers use it."""
    kind: str
    """The kind of frequencies; see `_kind_of`."""

    def fix(self, long: bool) -> None:
        """Chooses the frequencies, and keeps transformers from choosing others in a forward pass.

        `long`: choose the long factors, if these frequencies have any.
        """
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        module = self.module
        # Dynamic frequencies need no computation here: a module is built with those of the configured base.
        if self.kind in LONGROPE:
            buffer_name = "inv_freq" if self.layer_type is None else f"{self.layer_type}_inv_freq"
            parameters = _parameters_of_layer_type(module.config, self.layer_type)
            original = _original_length(module.config, parameters)
            device = getattr(module, buffer_name).device
            compute = ROPE_INIT_FUNCTIONS["longrope"]
            # Any length above the original one chooses the long factors.
            seq_len = original + 1 if long else None
            frequencies, _ = compute(module.config, device, seq_len=seq_len, **self._layer_argument)
            setattr(module, buffer_name, frequencies)
        # In a forward pass, transformers chooses longrope and dynamic frequencies anew, but never frequencies of the
        # kind "default". So tell transformers that these frequencies are of the kind "default".
        if self.layer_type is None:
            module.rope_type = "default"
        else:
            module.rope_type = {**module.rope_type, self.layer_type: "default"}

    def depends_on_row(self, length: int) -> bool:
        """True if the rotations of the first positions depend on the other positions in the row.

        Compares the rotations in a short row with those in a row that also has the last of `length` positions.
        """
        import torch

        count = min(_COMPARED_POSITIONS, length)
        short_row = self._rotations(count, last=count)
        long_row = self._rotations(count, last=max(length - 1, count))
        pairs = zip(short_row, long_row, strict=True)
        return not all(torch.equal(in_short_row, in_long_row) for in_short_row, in_long_row in pairs)

    def _rotations(self, count: int, *, last: int) -> list[torch.Tensor]:
        """The rotations of the first `count` positions, in a row of these positions and the position `last`."""
        import torch  # not at the top of the file, because a generator without torch reads manifests with this module

        buffer = next(self.module.buffers())
        hidden = torch.zeros(1, device=buffer.device)  # the module reads only its dtype and device
        positions = torch.tensor([[*range(count), last]], device=buffer.device)
        rotations = self.module(hidden, positions, **self._layer_argument)
        # Usually there are two parts, cosines and sines, each (1, positions, size).
        parts = rotations if isinstance(rotations, tuple) else (rotations,)
        return [part[:, :count] for part in parts]

    @property
    def _layer_argument(self) -> dict[str, Any]:
        """The keyword argument that tells transformers the type of layer; empty: all layers use this set."""
        if self.layer_type is None:
            return {}
        return {"layer_type": self.layer_type}


def _frequency_sets_of(module: Any) -> Iterator[_FrequencySet]:
    """Yields each set of frequencies of a module that depends on a length. A module that is not rotary has none."""
    kinds = getattr(module, "rope_type", None)
    config = getattr(module, "config", None)
    if kinds is None or config is None:
        return
    layer_types: list[str | None] = list(kinds) if isinstance(kinds, Mapping) else [None]
    for layer_type in layer_types:
        parameters = _parameters_of_layer_type(config, layer_type)
        kind = _kind_of(parameters)
        if kind in LONGROPE or "dynamic" in kind:
            yield _FrequencySet(module, layer_type, kind)


def _parameters_of_layer_type(config: Any, layer_type: str | None) -> Mapping[str, Any]:
    """The parameters of the frequencies of one type of layer (None: of all layers); empty: there are none."""
    if layer_type is None:
        all_parameters = _parameters_of(config)
        return all_parameters[0] if all_parameters else {}
    parameters: Mapping[str, Any] = config.rope_parameters[layer_type]
    return parameters

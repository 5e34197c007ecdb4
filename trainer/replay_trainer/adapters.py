"""Adapter: the LoRA adapter of a peft model, which is trained, published and restored in the place of whole weights.

A published folder holds `adapter_config.json`, with the name of the base model, and `adapter_model.safetensors`. With
`merge_adapter` it holds whole weights instead: the base with the adapter added to it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch import Tensor

WEIGHTS_FILE = "adapter_model.safetensors"


class Adapter:
    """The active LoRA adapter of a peft model. The other weights of the model never change."""

    def __init__(self, model: Any, merged: bool) -> None:
        """`model` is a PeftModel; `merged`: publish whole weights.

        Raises ValueError if the model has another kind of adapter, several active ones, no weights to train, or, unless
        `merged`, a base model without a name.
        """
        model.eval()  # LogprobModel does it for the base alone, which is inside
        self.base: Any = model.get_base_model()
        """The transformers model. peft has put the layers of the adapter into it, so it computes with the adapter."""
        self._model = model
        self._merged = merged
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

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the adapter, by their names in `adapter_model.safetensors`. They are those being trained."""
        from peft import get_peft_model_state_dict

        # The embeddings are the base's. With "auto", peft would ask the hub whether they have been resized.
        tensors: dict[str, Tensor] = get_peft_model_state_dict(
            self._model, adapter_name=self._name, save_embedding_layers=False
        )
        return tensors

    def weights(self) -> dict[str, Tensor]:
        """What a published folder holds: the tensors of the adapter, or of the whole model with the adapter added."""
        if not self._merged:
            return self.tensors()
        # A copy, because adding the adapter to the base and taking it out again would change the base by rounding.
        merged: dict[str, Tensor] = copy.deepcopy(self._model).merge_and_unload().state_dict()
        return merged

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Set the tensors of the adapter. Raises RuntimeError if their names or shapes are not those of this one."""
        from peft import set_peft_model_state_dict

        if differ := sorted(set(tensors) ^ set(self.tensors())):
            raise RuntimeError(
                f"the saved adapter and this one differ in {len(differ)} tensors, such as {differ[0]!r}: make the "
                "model with the LoraConfig of the run"
            )
        set_peft_model_state_dict(self._model, dict(tensors), adapter_name=self._name)

    def save_pretrained(self, folder: Path, state_dict: Mapping[str, Tensor]) -> None:
        """Write `weights()` to a folder, as PreTrainedModel.save_pretrained does."""
        from safetensors.torch import save_file

        if self._merged:
            self.base.save_pretrained(folder, state_dict=dict(state_dict))
            return
        contiguous = {name: tensor.contiguous() for name, tensor in state_dict.items()}
        save_file(contiguous, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        self._config.save_pretrained(folder)

    def off(self) -> AbstractContextManager[None]:
        """Inside, the model computes without the adapter: it is the base model."""
        context: AbstractContextManager[None] = self._model.disable_adapter()
        return context

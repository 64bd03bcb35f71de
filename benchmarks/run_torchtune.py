"""torchtune's own `lora_finetune_single_device` recipe, unmodified, in a process of its own.

    python -m benchmarks.run_torchtune ORDER.json

Only its configuration is ours, and the initial adapter, which is put into the model between `setup` and `train`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.measured import CLOCK, finish

# isort: split
import torch
import yaml
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file

from benchmarks.cases import Order
from benchmarks.workspace import START, Workspace
from providers.torchtune.families import describe
from tests.torchtune_recipe import recipe_config, recipe_module

PAD = 0
"""What `tests.torchtune_recipe.PlainTokenizer` pads with; no row may hold it."""


class StepLogger:
    """A metric logger that torchtune makes by its name in the configuration."""

    def log_config(self, config: Any) -> None:
        pass

    def log(self, name: str, data: Any, step: int) -> None:
        pass

    def log_dict(self, payload: dict[str, Any], step: int) -> None:
        CLOCK.step()
        CLOCK.losses.append(float(payload["loss"]))

    def close(self) -> None:
        pass


def configuration(order: Order, workspace: Workspace) -> dict[str, Any]:
    """The recipe's YAML as a dictionary."""
    s = order.settings
    rows = order.out / "rows.json"
    rows.write_text(json.dumps([{"input": prompt, "output": answer} for prompt, answer in workspace.texts]))
    text = recipe_config(
        workspace.model_dir, rows, order.out, steps=order.steps, rank=s.rank, alpha=int(s.alpha), lr=s.lr
    )
    config: dict[str, Any] = yaml.safe_load(text)
    config["model"] |= _architecture(workspace.model_dir)
    config["checkpointer"]["model_type"] = "LLAMA3_2" if describe(workspace.model_dir).tied else "LLAMA3"
    config["dataset"]["packed"] = order.case.packed
    if order.case.packed:
        config["tokenizer"]["max_seq_len"] = s.longest
    config["optimizer"]["fused"] = True
    config["lr_scheduler"]["num_warmup_steps"] = s.warmup
    config["metric_logger"] = {"_component_": "benchmarks.run_torchtune.StepLogger"}
    return config | {
        "batch_size": s.batch,
        "gradient_accumulation_steps": s.accumulation,
        "seed": s.seed,
        "clip_grad_norm": s.max_grad_norm,
        "dtype": order.dtype,
        "compile": bool(order.case.options.get("compile")),
    }


def _architecture(model_dir: Path) -> dict[str, Any]:
    a = describe(model_dir)
    common = {
        "vocab_size": a.vocab_size,
        "num_layers": a.num_layers,
        "num_heads": a.num_heads,
        "num_kv_heads": a.num_kv_heads,
        "embed_dim": a.embed_dim,
        "intermediate_dim": a.intermediate_dim,
        "max_seq_len": a.context_length,
        "norm_eps": a.norm_eps,
        "rope_base": int(a.rope_base),
    }
    if a.tied:
        return common
    # Only the builder of Llama 3 has an output layer of its own; it knows no RoPE scaling.
    return common | {"_component_": "torchtune.models.llama3.lora_llama3"}


def main(order: Order) -> None:
    torch.set_num_threads(order.threads)
    workspace = Workspace.open(order.workspace)
    assert not any(PAD in row.tokens for row in workspace.rows)
    fields = configuration(order, workspace)
    if "lora_llama3" in fields["model"]["_component_"].split("."):
        fields["model"].pop("scale_factor")
    config: Any = OmegaConf.create(fields)
    recipe = recipe_module().LoRAFinetuneRecipeSingleDevice(cfg=config)
    recipe.setup(cfg=config)
    parameters = {n: p for n, p in recipe._model.named_parameters() if p.requires_grad}
    for name, tensor in load_file(workspace.folder / START).items():
        parameters[name].data.copy_(tensor)
    CLOCK.begin()
    recipe.train()
    recipe.cleanup()
    batches = list(_batches(recipe, order.steps * order.settings.accumulation))
    finish(order, workspace, [(_sequences(batch), batch["tokens"].numel()) for batch in batches])
    save_file({n: p.detach().float() for n, p in parameters.items()}, order.out / "adapter.safetensors")


def _batches(recipe: Any, count: int) -> Iterator[dict[str, torch.Tensor]]:
    """What its data loader gave, by asking it again: it neither shuffles nor draws."""
    for number, batch in enumerate(recipe._dataloader):
        if number == count:
            return
        yield batch


def _sequences(batch: dict[str, torch.Tensor]) -> list[list[int]]:
    """The sequences of a batch, padded or packed, without padding."""
    positions = batch.get("input_pos")
    found: list[list[int]] = []
    for index, tokens in enumerate(batch["tokens"]):
        starts = [0] if positions is None else (positions[index] == 0).nonzero().flatten().tolist()
        for begin, end in zip(starts, [*starts[1:], len(tokens)], strict=True):
            found.append([token for token in tokens[begin:end].tolist() if token != PAD])
    return [sequence for sequence in found if sequence]


if __name__ == "__main__":
    main(Order.load(Path(sys.argv[1])))

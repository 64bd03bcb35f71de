"""TRL's SFTTrainer with PEFT, unmodified, in a process of its own.

    python -m benchmarks.run_trl ORDER.json

Without `autocast`, weights and adapter are in the case's dtype; with it, TRL's default, both are in fp32 and computed
with in bf16.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from benchmarks.measured import CLOCK, finish

# isort: split
import peft
import torch
import transformers
from datasets import Dataset
from torch.optim.lr_scheduler import LambdaLR
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from benchmarks.cases import Order
from benchmarks.workspace import START_PEFT, Workspace
from post_training.training.model import TORCH_DTYPES
from post_training.training.optim import OptimSettings, learning_rate

IGNORED = -100


class StepClock(transformers.TrainerCallback):
    """Takes the time at the end of each step and the loss that is logged after it."""

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        CLOCK.begin()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        CLOCK.step()

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        if "loss" in logs:
            CLOCK.losses.append(logs["loss"])


class RecordingCollator:
    """Keeps what TRL's own collator gave: its sampler may draw, so it can't be asked again."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.batches: list[dict[str, torch.Tensor]] = []

    def __call__(self, examples: list[Any]) -> dict[str, torch.Tensor]:
        batch = self.inner(examples)
        self.batches.append({name: value.clone() for name, value in batch.items() if isinstance(value, torch.Tensor)})
        return batch


def model_of(order: Order, workspace: Workspace) -> peft.PeftModel:
    """The base with the workspace's initial adapter, trainable."""
    autocast = bool(order.case.options.get("autocast"))
    dtype = torch.float32 if autocast else TORCH_DTYPES[order.dtype]
    attention = order.case.options.get("attention", "sdpa")
    base = transformers.AutoModelForCausalLM.from_pretrained(
        workspace.model_dir, dtype=dtype, attn_implementation=attention
    )
    start = str(workspace.folder / START_PEFT)
    model = peft.PeftModel.from_pretrained(base, start, is_trainable=True, autocast_adapter_dtype=False)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    return model


def data_set(workspace: Workspace) -> Dataset:
    """Token ids, and labels without the prompt."""
    labels = [
        [token if weight else IGNORED for token, weight in zip(row.tokens.tolist(), row.weights.tolist(), strict=True)]
        for row in workspace.rows
    ]
    return Dataset.from_dict({"input_ids": [row.tokens.tolist() for row in workspace.rows], "labels": labels})


def arguments(order: Order) -> SFTConfig:
    s, options = order.settings, order.case.options
    return SFTConfig(
        output_dir=str(order.out / "saved"),
        per_device_train_batch_size=s.batch,
        gradient_accumulation_steps=s.accumulation,
        max_steps=order.steps,
        max_length=s.longest,
        packing=order.case.packed,
        train_sampling_strategy="group_by_length" if options.get("grouped") else "sequential",
        torch_compile=bool(options.get("compile")),
        bf16=bool(options.get("autocast")),
        gradient_checkpointing=False,
        max_grad_norm=s.max_grad_norm,
        seed=s.seed,
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


def main(order: Order) -> None:
    torch.set_num_threads(order.threads)
    s = order.settings
    workspace = Workspace.open(order.workspace)
    model = model_of(order, workspace)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=s.lr, weight_decay=0.0, fused=True)
    optim = OptimSettings(order.steps, lr=1.0, warmup_steps=s.warmup)
    trainer = SFTTrainer(
        model=model,  # pyright: ignore[reportArgumentType]
        args=arguments(order),
        train_dataset=data_set(workspace),
        processing_class=transformers.AutoTokenizer.from_pretrained(workspace.model_dir),
        callbacks=[StepClock()],
        optimizers=(optimizer, LambdaLR(optimizer, lambda step: learning_rate(optim, step))),
    )
    collator = RecordingCollator(trainer.data_collator)
    trainer.data_collator = collator  # pyright: ignore[reportAttributeAccessIssue]
    trainer.train()
    # Its loader looks one batch ahead.
    batches = collator.batches[: order.steps * s.accumulation]
    finish(order, workspace, [(_sequences(batch), batch["input_ids"].numel()) for batch in batches])
    model.save_pretrained(str(order.out / "adapter"))


def _sequences(batch: dict[str, torch.Tensor]) -> list[list[int]]:
    """The sequences of a batch, padded or flat, without padding."""
    mask, positions = batch.get("attention_mask"), batch.get("position_ids")
    if mask is not None:
        rows = zip(batch["input_ids"], mask, strict=True)
        return [tokens[kept.bool()].tolist() for tokens, kept in rows]
    assert positions is not None
    tokens = batch["input_ids"].flatten()
    starts = (positions.flatten() == 0).nonzero().flatten().tolist()
    return [tokens[a:b].tolist() for a, b in zip(starts, [*starts[1:], len(tokens)], strict=True)]


if __name__ == "__main__":
    main(Order.load(Path(sys.argv[1])))

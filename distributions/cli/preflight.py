"""What `postgrad post_training preflight` prints."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from distributions.cli.output import clock, console, print_fields

if TYPE_CHECKING:
    from apis.post_training.reports import DatasetReport, MemoryEstimate, PreflightReport, RowNumbers, TimeEstimate


def print_report(report: PreflightReport) -> None:
    """Counts, what was cut or dropped, steps, estimates, and the sample with its supervised text marked."""
    fields = [("format", report.dataset.format.value), *_data_fields("", report.dataset)]
    if report.validation_dataset is not None:
        fields += _data_fields("validation ", report.validation_dataset)
    if (split := report.validation_split) is not None:
        fields.append(("held back", f"{split.validation_rows:,} rows to validate, {split.training_rows:,} to train on"))
    fields += [
        ("steps", _steps(report)),
        ("training", _training(report)),
        ("adapter", f"{report.trainable_parameters:,} trainable parameters"),
        ("memory", _memory(report.memory)),
        ("time", _time(report.time)),
    ]
    print_fields(fields)
    print()
    _print_sample(report.dataset)


def _data_fields(prefix: str, data: DatasetReport) -> list[tuple[str, str | None]]:
    reasons = {"too long": data.dropped.overlength, "no supervised token": data.dropped.unsupervised}
    kept = data.rows - data.dropped.count
    return [
        (f"{prefix}rows", f"{kept:,} of {data.rows:,}" if data.dropped.count else f"{data.rows:,}"),
        (f"{prefix}tokens", f"{data.tokens:,}, of them {data.supervised_tokens:,} supervised"),
        (f"{prefix}longest row", f"{data.longest_row_tokens:,} tokens"),
        (f"{prefix}truncated", _numbers(data.truncated)),
        *((f"{prefix}dropped", _numbers(rows, reason)) for reason, rows in reasons.items()),
        (f"{prefix}control tokens", _numbers(data.control_tokens, "as text in the data")),
    ]


def _numbers(rows: RowNumbers, reason: str = "") -> str | None:
    """None where there are none."""
    if not rows.count:
        return None
    more = ", …" if rows.count > len(rows.first_rows) else ""
    why = f", {reason}" if reason else ""
    return f"{rows.count:,} {'row' if rows.count == 1 else 'rows'}{why}: {', '.join(map(str, rows.first_rows))}{more}"


def _steps(report: PreflightReport) -> str:
    return (
        f"{report.total_steps:,}, {report.steps_per_epoch:,} an epoch, {report.warmup_steps:,} of warm-up; "
        f"rows of up to {report.max_seq_len:,} tokens"
    )


def _training(report: PreflightReport) -> str:
    epochs = f"{report.n_epochs:,} {'epoch' if report.n_epochs == 1 else 'epochs'}"
    return f"{epochs}, batches of {report.batch_size:,}, learning rate {report.lr:g}"


def _memory(estimate: MemoryEstimate) -> str:
    parts = {
        "base": estimate.base_bytes,
        "adapter": estimate.adapter_bytes,
        "activations": estimate.activation_bytes,
        "logits": estimate.logit_bytes,
    }
    shown = ", ".join(f"{name} {_gib(size)}" for name, size in parts.items())
    return f"about {_gib(estimate.total_bytes)} GiB on {estimate.device_kind} ({shown})"


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f}"


def _time(estimate: TimeEstimate) -> str:
    if estimate.seconds is None or estimate.tokens_per_second is None:
        return estimate.note
    return f"about {clock(estimate.seconds)} at {estimate.tokens_per_second:,.0f} tokens/s, {estimate.note}"


def _print_sample(data: DatasetReport) -> None:
    """Supervised text in green on a terminal, between « and » elsewhere."""
    from rich.text import Text

    out = console(sys.stdout)
    text = Text()
    for run in data.sample:
        if not run.supervised:
            text.append(run.text)
        elif out.is_terminal:
            text.append(run.text, style="bold green")
        else:
            text.append(f"«{run.text}»")
    out.print(Text("sample, with what is learnt marked:", style="bold"))
    out.print(text)

"""What clients of Llama Stack send as a dialog: rows of messages, trained as if they had said so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from post_training.worker import announcing
from tests.job_bench import Bench, VerifierHere, rows
from tests.tiny_llama import save_tiny_llama

# PEFT reads an attribute that transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")


def conversations(count: int) -> list[dict[str, Any]]:
    pairs = [(row["prompt"], row["completion"]) for row in rows(count)]
    return [
        {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]}
        for asked, said in pairs
    ]


def test_messages_are_trained_to_the_same_bytes_under_either_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(announcing, "Verifier", VerifierHere)
    bench = Bench(tmp_path / "home", save_tiny_llama(tmp_path / "tiny", context=128))
    dialog, messages, alike = (
        bench.run(bench.submit(name, data, n_epochs=1, data_config={"data_format": data_format}))
        for name, data, data_format in (
            ("a", conversations(5), "dialog"),
            ("b", conversations(5), "messages"),
            ("c", [{"dialog": row["messages"]} for row in conversations(5)], "dialog"),
        )
    )
    assert (dialog.status, dialog.steps) == ("completed", [3])
    assert dialog == messages == alike

"""Rows, their tokens and one initial adapter: what all tools are given alike.

    python -m benchmarks.workspace MODEL_DIR FOLDER [--rank 16 --alpha 32 --longest 512 --seed 3 --rows 400]

Rows end with the end-of-turn token, as torchtune's tokenizer ends them; what a template writes behind it is left out.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from apis.post_training.models import DatasetFormat
from benchmarks.machine import REPOSITORY
from post_training.data.chat import ChatTokenizer
from post_training.data.preflight import tokenize_dataset
from post_training.data.types import TokenizedRow
from tests.shared_data import find_shared

ROWS = "rows.json"
START = "start.safetensors"
START_PEFT = "start_peft"
HELD_OUT_ROWS = 32
DATA_SET = "alpaca_en_demo.jsonl"


@dataclass(frozen=True)
class Workspace:
    """The folder that all measured processes read.

    Attributes:
        rows: to train on, in file order.
        held_out: to compare trained adapters by; the last of the data set.
        texts: each training row's prompt as the chat template renders it, and its answer.
    """

    folder: Path
    model_dir: Path
    rows: list[TokenizedRow]
    held_out: list[TokenizedRow]
    texts: list[tuple[str, str]]

    @classmethod
    def open(cls, folder: Path) -> Workspace:
        found = json.loads((folder / ROWS).read_text())
        rows = [_row(number, each) for number, each in enumerate(found["rows"])]
        held_out = [_row(number, each) for number, each in enumerate(found["held_out"])]
        texts = [(each["prompt"], each["answer"]) for each in found["rows"]]
        return cls(folder, Path(found["model_dir"]), rows, held_out, texts)


def _row(number: int, fields: dict[str, Any]) -> TokenizedRow:
    tokens = np.asarray(fields["tokens"], dtype=np.int32)
    weights = (np.arange(len(tokens)) >= fields["prompt_tokens"]).astype(np.float32)
    return TokenizedRow(number, tokens, weights)


def real_model_dir() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face directory, fetched and converted once, as the quickstart does."""
    script = REPOSITORY / "examples" / "quickstart" / "fetch_model.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"the model could not be fetched:\n{done.stdout}{done.stderr}")
    return Path(done.stdout.splitlines()[-1])


def data_rows(count: int) -> tuple[str, list[dict[str, Any]]]:
    """What the rows are, and the first `count` instructions with answers: public ones, else generated."""
    file = find_shared(DATA_SET)
    if file is None:
        return f"{count} generated rows", generated_rows(count)
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()][:count]
    return f"the first {len(rows)} rows of {DATA_SET}", rows


def generated_rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Arithmetic in words; lengths spread as instruction data has them: log-normal, about 170 tokens on average."""
    draw = random.Random(seed)
    return [_generated(draw, min(60, max(1, round(draw.lognormvariate(2.0, 0.75))))) for _ in range(count)]


def _generated(draw: random.Random, sentences: int) -> dict[str, Any]:
    numbers = [draw.randrange(10, 1000) for _ in range(sentences)]
    sums = np.cumsum(numbers).tolist()
    steps = [f"After {number} the sum is {total}." for number, total in zip(numbers, sums, strict=True)]
    asked = f"Add {len(numbers)} numbers one by one, beginning with {numbers[0]}."
    return {"instruction": asked, "input": "", "output": " ".join(steps)}


def prepare(folder: Path, model_dir: Path, *, rank: int, alpha: float, longest: int, seed: int, count: int) -> None:
    """Write the rows, their texts and the initial adapter into `folder`.

    Raises:
        ValueError: too few rows are short enough.
    """
    folder.mkdir(parents=True, exist_ok=True)
    described, rows = data_rows(count)
    fields = tokenized(model_dir, rows, longest)
    if len(fields) <= 2 * HELD_OUT_ROWS:
        raise ValueError(f"only {len(fields)} rows have at most {longest} tokens; take more rows or a higher limit")
    content = {
        "model_dir": str(model_dir),
        "described": described,
        "rows": fields[:-HELD_OUT_ROWS],
        "held_out": fields[-HELD_OUT_ROWS:],
    }
    (folder / ROWS).write_text(json.dumps(content))
    _save_start(folder, model_dir, rank, alpha, seed)


def tokenized(model_dir: Path, rows: list[dict[str, Any]], longest: int) -> list[dict[str, Any]]:
    """Tokens, prompt length and texts of each row of at most `longest` tokens."""
    tokenizer = ChatTokenizer.from_dir(model_dir)
    found = tokenize_dataset(rows, tokenizer, DatasetFormat.alpaca, False, longest, on_overlength="drop").rows
    fields = []
    for row in found:
        supervised = np.flatnonzero(row.weights)
        begin, end = int(supervised[0]), int(supervised[-1]) + 1
        ids = row.tokens[:end].tolist()
        prompt = tokenizer.decode(ids[:begin], skip_special_tokens=False)
        answer = tokenizer.decode(ids[begin:-1], skip_special_tokens=False)
        fields.append({"tokens": ids, "prompt_tokens": begin, "prompt": prompt, "answer": answer})
    return fields


def _save_start(folder: Path, model_dir: Path, rank: int, alpha: float, seed: int) -> None:
    from safetensors.torch import save_file

    from post_training.training.model import LoraSettings, ModelConfig
    from providers.torchtune.model import load_model

    model = load_model(ModelConfig(model_dir, LoraSettings(rank, alpha), dtype="fp32", seed=seed))
    start = {name: tensor.detach().clone() for name, tensor in model.adapter_parameters().items()}
    save_file(start, folder / START)
    tensors, config = model.peft_adapter(start)
    (folder / START_PEFT).mkdir(exist_ok=True)
    save_file(tensors, folder / START_PEFT / "adapter_model.safetensors")
    (folder / START_PEFT / "adapter_config.json").write_text(json.dumps(config))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--alpha", type=float, default=32)
    parser.add_argument("--longest", type=int, default=512)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--rows", type=int, default=400)
    a = parser.parse_args()
    prepare(a.folder, a.model_dir, rank=a.rank, alpha=a.alpha, longest=a.longest, seed=a.seed, count=a.rows)


if __name__ == "__main__":
    main()

"""transformers' own `generate`, as a process that answers prompts from its standard input.

    python -m benchmarks.run_generate MODEL_DIR bf16 THREADS

Each line is `{"messages": […], "max_tokens": n}`; each answer `{"text", "tokens", "seconds"}`, greedy, one stream.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
import transformers

from post_training.training.model import TORCH_DTYPES


def answer(model: Any, tokenizer: Any, messages: list[dict[str, str]], max_tokens: int) -> dict[str, Any]:
    """Seconds run from the text of the prompt to the text of the answer."""
    began = time.perf_counter()
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.inference_mode():
        ids = model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)
    new = ids[0, inputs["input_ids"].shape[1] :]
    text = tokenizer.decode(new, skip_special_tokens=True)
    return {"text": text, "tokens": len(new), "seconds": time.perf_counter() - began}


def main() -> None:
    folder, dtype, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=TORCH_DTYPES[dtype]).eval()
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps(answer(model, tokenizer, order["messages"], order["max_tokens"])), flush=True)


if __name__ == "__main__":
    main()

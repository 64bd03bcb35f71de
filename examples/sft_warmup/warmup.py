"""Fine-tune the quickstart's model step by step, and print the loss: python examples/sft_warmup/warmup.py"""

import json
from pathlib import Path

from post_training.client import SFTClient

DATA = Path(__file__).parents[1] / "quickstart" / "data" / "train.jsonl"

rows = [json.loads(line) for line in DATA.read_text().splitlines()]
with SFTClient() as client:  # the stack at $POSTGRAD_BASE_URL, or http://127.0.0.1:8321
    client.submit(model="smollm2-135m-instruct", lora={"lora_rank": 16}, optimizer_config={"lr": 1e-3})
    for step in range(1, 13):
        answer = client.train_step(rows[4 * step - 4 : 4 * step], step=step)
        print(f"step {step}  loss {answer.loss:.4f}", flush=True)
    print("checkpoint", client.save_checkpoint("warm").checkpoint.identifier)
    client.complete()

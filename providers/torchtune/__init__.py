"""inline::torchtune: single-device LoRA fine-tuning. Everything that knows torchtune stays in this folder."""

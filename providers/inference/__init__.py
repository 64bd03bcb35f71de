"""inline::transformers: chat and text completion for base models and checkpoints."""

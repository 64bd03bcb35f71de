"""How it is done: jobs, data, the trainer, checkpoints, workers, the client."""

"""What users import to talk to a stack: `StackClient`, `AsyncStackClient`. No torch, no server code."""

from post_training.client.stack import AsyncStackClient, StackClient

__all__ = ["AsyncStackClient", "StackClient"]

"""What users import: `StackClient`, `AsyncStackClient`, `SFTClient`. No torch, no server code."""

from post_training.client.sft import SFTClient
from post_training.client.stack import AsyncStackClient, StackClient

__all__ = ["AsyncStackClient", "SFTClient", "StackClient"]

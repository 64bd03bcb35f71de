"""Being told to stop. Without torch, so that a worker can handle it before torch is there."""

from __future__ import annotations


class Interrupted(Exception):
    """The work was told to stop and did so between two writes; nothing half-done was applied."""

"""Tests that really kill, fill or cut something."""

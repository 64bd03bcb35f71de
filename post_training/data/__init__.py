"""Rows to messages to tokens and weights to flat batches. No torch."""

"""Ways to start a worker."""

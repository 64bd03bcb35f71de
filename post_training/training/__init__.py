"""One step, one validation. Knows no job and no HTTP."""

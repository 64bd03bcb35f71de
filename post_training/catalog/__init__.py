"""Which models and data sets the stack knows, and where they lie. No torch."""

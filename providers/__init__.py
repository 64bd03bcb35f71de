"""Who does it: one folder a provider, found through the registry."""

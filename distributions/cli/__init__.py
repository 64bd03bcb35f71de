"""The `postgrad` command."""

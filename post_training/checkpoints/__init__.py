"""Directories that prove themselves."""

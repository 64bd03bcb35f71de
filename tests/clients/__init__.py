"""Real clients from PyPI, each in a virtual environment of its own, against one live server."""

"""How a stack is built: template, resolved providers, server; and the command line."""

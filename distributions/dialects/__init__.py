"""Other generations of the wire, each translated into the one spec in a file of its own."""

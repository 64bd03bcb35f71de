"""SFT as functions: a scheduler gives a client a device and a training server, and the client drives the loop."""

"""Targets: what is held to the specification, each in a process of its own."""

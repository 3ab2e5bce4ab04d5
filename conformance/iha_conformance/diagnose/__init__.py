"""Which dialect of the operation a port speaks, found from outside (`iha diagnose`)."""

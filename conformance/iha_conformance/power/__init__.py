"""The power of the suite: implementations that must pass, and known-wrong ones that must fail."""

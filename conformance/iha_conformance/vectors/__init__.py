"""Test vectors: inputs and results as files, for ports in any language, and the safe reading of both."""

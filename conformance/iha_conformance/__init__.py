"""The conformance kit: holds any implementation of Interleaved Head Attention to its specification."""

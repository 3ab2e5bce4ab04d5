"""Reports of a run: JSON for machines, a table for people."""

"""Stand-ins for ports: honest ones that must pass and faulty ones that must be caught."""

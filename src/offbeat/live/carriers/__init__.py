"""The ways bytes go between workers: memory that the ranks of a host share, and groups between hosts."""

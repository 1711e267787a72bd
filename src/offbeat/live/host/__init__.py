"""The host process: it owns the memory of a host's workers, keeps their books, and makes every sum."""

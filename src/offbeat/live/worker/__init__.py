"""A worker's side: its one line to the host process, and what it says there."""

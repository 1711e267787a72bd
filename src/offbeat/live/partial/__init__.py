"""Partial rounds, shared weights and the bell between processes."""

"""Vectors of a whole model: how they lie in memory, are summed, and are coded."""

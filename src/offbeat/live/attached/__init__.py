"""A strategy under the user's own optimiser: from ``backward()`` to what is exchanged, and back."""

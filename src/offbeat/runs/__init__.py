"""What a run leaves behind, in both worlds."""

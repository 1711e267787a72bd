"""What everybody may use: draws without streams, units, checks of arguments, the version."""

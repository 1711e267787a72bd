"""Memory that several processes see, and adding in it."""

"""What a method is written with."""

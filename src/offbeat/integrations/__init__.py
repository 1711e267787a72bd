"""Offbeat under other people's trainers: one file each, which imports its trainer when it is used."""

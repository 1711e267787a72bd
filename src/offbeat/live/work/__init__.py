"""The data of all workers, taken by whoever is free, and schedules that follow it."""

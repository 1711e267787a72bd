"""Whole runs of a task in processes of this machine, or as a member of a started job."""

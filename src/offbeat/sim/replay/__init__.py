"""Following the order of a recorded run: the same seats and shared weights as ever, but no referee, no clock decides.

Each worker has the list of what happened to it. Whatever is next on a list is done as soon as it can be: a deposit when
its worker has made it, a snapshot at once, a result when everybody of its block has given its snapshot. Lists of a run
that took place can always be followed to their ends; where they cannot, the record is not of this run.
"""

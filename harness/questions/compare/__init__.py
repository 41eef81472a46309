"""Is one side faster than the other? The room of `harness compare`, for runs; rows of one run are compared by the core.

command.py     the command
sides.py       reads runs as sides, and a baseline
decide.py      the verdicts on sides, and what else differs between them
equal_runs.py  how far equal runs of a machine differ, from earlier ones
page.py        the verdicts, the values of both sides, the differences; the same for JUnit
"""

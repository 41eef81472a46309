"""Is it slower than before, and since when? The room of `harness compare --history`.

earlier_runs.py  reads a run and the earlier runs of its scenario on its machine
decide.py        its series, their levels and shifts, and the verdict
page.py          its page, and its cases for JUnit
"""

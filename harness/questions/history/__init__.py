"""Is it slower than before, and since when? The room of `harness compare --history`.

decide.py  a run and the earlier runs of its scenario on its machine
page.py    its page, and its cases for JUnit
"""

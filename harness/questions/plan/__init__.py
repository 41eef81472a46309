"""How long for 500,000 items? The room of `harness plan`.

command.py  the command
decide.py  a prediction from a finished run, with its interval
page.py    its page
"""

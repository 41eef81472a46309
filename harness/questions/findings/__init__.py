"""Why is it slow, and what to change? The findings of every run.

A rule is a function of a row's facts. It says what it saw, what it costs, and which settings to paste.

rules.py        what rules are made of: the facts of a row, a rule with its texts, settings as users write them
decide.py       all rules, ranked by what they cost
speed.py, cache.py, queue.py, setup.py, stream.py, bad_answers.py  the rules, one file a topic
limits.py       what limits a row where no other rule explains it
"""

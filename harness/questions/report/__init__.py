"""What did a run show? The page of a run, which has the answers of all questions, and its files.

command.py      `harness report`
decide.py       gates and provisional checks, by the options of the command
headline.py     the first sentence: the answer to the question that the run asked
page.py         the page as elements: terminal and Markdown print it
html_parts.py   what only the HTML page has: tiles, charts, every cell, what ran
junit_cases.py  the run as test cases
store.py        writes summary.json and report.html at the end of a run
"""

"""How fast is a server that already runs? The room of `harness quick`: an answer in seconds, without a scenario.

command.py  the command; without an address it asks before a server gets load
search.py  finds the server and its loaded model, times one request, and makes a scenario of one, four and eight users
combinations.py  or of the prompts, contexts, users and rates that one line asks for, in the words of other tools too
decide.py  the numbers of levels, and of combinations, from however few requests there are
record.py  those of a stored run
page.py    one table, how near the hardware it is, the worst finding, what to do next
combinations_page.py  the tables of combinations, and the page to paste into a forum
"""

"""Which build, image or value made it slower? The room of `harness bisect`.

The ends of the list are started in turns until their difference is proven; then the list is halved.

command.py      the command
entry_list.py   reads the entries: images of a file, values of a variable; which are good and bad
search.py       builds and starts what is decided, and stores each start; goes on after any end
entry_build.py  runs the command that builds an entry
decide.py       which entry comes next, and what the starts prove: pure functions of the starts so far
record.py       bisect.json: the question and the starts
bisected.py     the answer by the records: the levels, why it is slower, what else differs
bisect_words.py why an entry is started
page.py         its page
chart.py        its chart
"""

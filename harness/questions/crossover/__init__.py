"""From which context depth, prompt length or number of users on is another server faster?

decide.py  the answer of a sweep; also from how many users on speculation stops paying
chart.py   speeds over what varies
"""

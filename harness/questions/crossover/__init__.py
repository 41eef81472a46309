"""From which context depth, prompt length or number of users on is another server faster?

decide.py       the answer of a sweep; also from where on speculation stops paying
speculation.py  what speculation does to decode, first token and acceptance; one sentence about several loads
page.py         the table of speculation
chart.py        speeds over what varies
"""

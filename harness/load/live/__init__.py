"""What Locust's web UI shows of an LLM load while it runs: the tab "LLM" and the page /llm.

histogram.py  latencies with a resolution of 1 %, which add up over processes
tally.py      what a load process counts, request by request, and hands over each second or three
book.py       where the hand-overs meet: the last seconds, the whole test, and the course between
observed.py   the newest of what the harness writes of the server and its machine
access.py     which requests may reach the web UI
swarm.py      the answer to the web form
page.py       routes of Locust's web server, and its tab
wire.py       Locust's events that carry all this

These are numbers to look at while a load runs. A report is made from requests.jsonl, and from nothing here.
"""

"""The load generator: what runs inside Locust's processes, and the only code that imports Locust and gevent.

user.py       the base class of every simulated person or agent
process.py    what all users of one load process share; where a request becomes a record
wiring.py     Locust's events, and what happens at each
options.py    the command line and web form of a locustfile started by hand, as a Job
tickets.py    which request of the sequence comes next, across processes
refused.py    by hand: the end of a load whose first requests are all refused for what they ask
meet.py       where the parts of a mix wait for each other
client.py     one keep-alive connection; bytes with the time at which they arrived
exchange.py   one request and what came back of it
clock.py      the kernel's receive time, on the monotonic clock
sse.py        bytes to events
answer.py     events and times to the observations of a Request
recorder.py   records and marks to their files
health.py     whether the load process itself is the limit
"""

"""The load generator: what runs inside Locust's processes, and the only code that imports Locust and gevent.

What to send, and when:
user.py       the base class of every simulated person or agent
tools.py      the tools of an agent, and a server's calls of them
process.py    what all users of one load process share; the body of a request; where a request becomes a record
first_look.py whether the server is there, and which model it offers
tickets.py    which request of the sequence comes next, across processes and machines
course.py     the tickets of a load's stages, one after the other; where the parts of a mix wait for each other
stages.py     how many users there are in which stage

One request and its answer:
client.py     one keep-alive connection; bytes with the time at which they arrived
dialer.py     new connections: the addresses of the server's name, and TLS
reader.py     all sockets of a process: a system call, a stamp and an append for each read
clock.py      the kernel's receive time, on the monotonic clock
exchange.py   one request and what came back of it
form.py       what the events of one stream have in common, so that most need no parsing
sse.py        bytes to events
answer.py     events and times to the observations of a Request
later.py      what can wait until nothing else is to be done
recorder.py   records and marks to their files
health.py     whether the load process itself is the limit

Locust around it:
wiring.py     Locust's events, and what happens at each
options.py    the command line and web form of a locustfile started by hand, as a Job
steer.py      the web form: whether a load can begin, or go on, with what it says
drain.py      by hand, the end of a load of several load processes
refused.py    by hand: the end of a load whose first requests are all refused for what they ask
master.py     hands out the work to machines, and takes in their records
worker.py     a load process on a machine of its own
spool.py      its records on their way to the run directory
live/         the tab and the page of a live load
"""

"""The load generator: what runs inside Locust's processes, and the only code that imports Locust and gevent.

What to send, and when:
user.py           the base class of every simulated person or agent
openai_api.py     the body of a request; the tools of an agent, and a server's calls of them
process.py        what all users of one load process share; where a request becomes a record
preflight.py      whether the server answers, which model it offers, and whether what the job names can be used
sequencer.py      which request of the sequence comes next, across stages, processes and machines

One request and its response:
client.py         one keep-alive connection; resolving, connecting, TLS
reader.py         all sockets of a process, with the kernel's receive time of each read; the queue for idle moments
exchange.py       one HTTP request and what came back of it
sse.py            bytes to events; the template of events that need no decoding
answer.py         the observations of a response, and what the JSON of the API adds to them
response.py       events and times to an Answer
recorder.py       records and marks to their files; whether the load process itself is the bottleneck

Locust around it:
locust_plugin.py  Locust's events, and what happens at each; the number of users in each stage; the graceful stop
options.py        the command line and web form of a locustfile with stock Locust, as a Job; their validation
master.py         hands out the work to machines, and receives their records
worker.py         a load process on a remote machine
live_metrics.py   the numbers of a live load
live_tables.py    these numbers as tables: of the tab, the log, CSV, HTML
stock_output.py   the LLM metrics in what stock Locust prints and writes
metrics_endpoint.py  the numbers for Prometheus: /metrics
web_ui.py         the tab and the page of a live load; the start form
web_access.py     which requests may reach the web UI
"""

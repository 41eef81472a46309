"""The load generator: what runs inside Locust's processes, and the only code that imports Locust and gevent.

What to send, and when:
user.py           the base class of every virtual user
load_process.py   what all users of one load process share; the checks before a load; a request becomes a record
sequencer.py      which request of the sequence comes next, across stages, processes and machines

One request and its response:
client.py         one keep-alive connection; resolving, connecting, TLS
reader.py         all sockets of a process, with the kernel's receive time of each read; the queue for idle moments
exchange.py       one HTTP request, and its response as bytes, events and times
sse.py            bytes to events; the template of events that need no decoding
openai_api.py     the JSON of a request, of tool calls, and of a response
channels.py       the generated text of a response, in every form in which servers send it
anthropic_api.py  the same of Anthropic's Messages API, translated
odd_text.py       whether an answer is nonsense, such as one token again and again
recorder.py       records and marks to their files; whether the load process itself is the bottleneck

Locust around it:
locust_plugin.py  Locust's events, and what happens at each; the number of users in each stage; the graceful stop
options.py        the command line and web form of a locustfile with stock Locust, as a Job; their validation
master.py         hands out the work to machines, and receives their records
worker.py         a load process on a remote machine
live_metrics.py   the numbers of a live load
live_outputs.py   these numbers as tables, in stock Locust's outputs, and for Prometheus
web_ui.py         the tab and the page of a live load; the start form
web_access.py     which requests may reach the web UI
"""

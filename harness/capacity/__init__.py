"""How many users a server holds: probes that stop at clear evidence, and the searches that choose their loads.

Pure: measurements come in, answers come out. `slo.py` cuts records into blocks, `evidence.py` is the sequential test of
one probe, `search.py` finds the largest load that meets the SLOs, `knee.py` the load beyond which more concurrency
stops paying. `result.py` is what is kept of it, with the load from which on one server is
better than another.
"""

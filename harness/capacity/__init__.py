"""How many users a server holds: probes that stop at clear evidence, and the searches that choose their loads.

Pure: measurements come in, answers come out. `evidence.py` is the sequential test of one probe, `search.py` finds the
largest load that meets the SLOs, `crossing.py` the load from which on one server is better, `frontier.py` the pairs of
loads of two classes that meet them, `knee.py` the load beyond which more concurrency stops paying, by the curves of
`unimodal.py`.
"""

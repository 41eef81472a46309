"""How many users, or requests per second, does a server hold? The room of `harness capacity`.

First an estimate: doubling levels in one running load, until one breaks. Then its proof, close to the limit first.

command.py  the command
search.py   starts the servers, runs the levels that are decided, and stores capacity.json as it goes
decide.py   which level comes next, and what the levels say: pure functions of the probes so far
record.py   capacity.json, which the search writes and everything else reads
level.py    one level: its probes, and the rule that decides it
blocks.py   the SLOs, and the blocks of a probe, which are cut from the records of its load
knee.py     where more users stop paying (`--knee`); the fit of its curve is `harness/numbers/peak_curve.py`
what_if.py  what a stored search says about other SLOs (`harness report SEARCH --check`)
page.py, chart.py  how the answer is shown

Whether a share of requests is within a bound is decided by `harness/numbers/share_test.py`, for checks as well.
"""

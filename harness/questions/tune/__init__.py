"""Which settings are faster, and is it proven? The room of `harness tune`.

The reference is started, then one change after the other; the best is proven against the reference on new prompts.

command.py   the command
search.py    starts what is decided, and stores what was asked and tried as it goes; puts a user's server back
advised.py   what a finding of a run advises, which is tried instead of a search
proof_run.py runs the proof, and stores what it says
decide.py    which settings come next, and what the proof says: pure functions of the starts so far
proof.py     the results of each start and of each side of the proof, from their records
spelling.py  how a setting is called in a scenario, in a finding and by its users; what is printed to paste
record.py    tune.json: the question, the trials and the proof, each written by its part
page.py      its page
"""

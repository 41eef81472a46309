"""Is the quantized model still right? Whether two servers give the same answers to questions with known answers.

decide.py  the answers of each side, compared by `harness/numbers/known_answers.py`
page.py    the verdict, its table and its chart
"""

"""A long run of everything at once against one engine: ``python -m tests.soak --minutes 10``.

`world.py` is what the actors share, `choices.py` makes random requests, `actors.py`,
`steerers.py` and `keepers.py` are the threads, `__main__.py` runs them, watches, and judges the
end.
"""

"""Measures what capture costs: statistics of pairs, the sweep of ``kqview bench``, its records.

The scripts in the folder bench/ of the repository use the same parts on their own models, and so
can other code that times its captures.
"""

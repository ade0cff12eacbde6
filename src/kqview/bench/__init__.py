"""Measures what capture costs: the statistics, the runs and the sweep of ``kqview bench``.

The scripts in the repository's folder bench/ use the same parts on a model of their own; so does
code that wants to time its own captures. Needs nothing but numpy.
"""

"""The attack: everything a hostile caller can send, at random from a seed, and what came of it.

``python -m tests.attack --minutes 15`` runs all of it. Each module is one way in and runs alone:
``python -m tests.attack.bodies --minutes 1``. All of it stays on the loopback interface, is bounded
in time, and repeats from its seed.
"""

"""For every test: property tests are judged by what they find, not by how fast the machine is."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# A machine that does other work takes a second over an example now and then; that is no failure.
settings.register_profile(
    "kqview", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
# The same examples each time: a change is judged by its own faults.
settings.register_profile("ci", settings.get_profile("kqview"), derandomize=True)
settings.load_profile("kqview")

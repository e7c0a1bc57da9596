"""What holds for all tests."""

from __future__ import annotations

from hypothesis import settings

# An example's time is no property of the code: a machine that stalls would fail it.
settings.register_profile("pointsman", deadline=None)
settings.load_profile("pointsman")

"""Tests of a fleet of real processes under load while one of them fails."""

"""Tests of single modules, by examples and by properties that hold for every input."""

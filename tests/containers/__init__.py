"""Tests of images and compose files on a real Docker engine."""

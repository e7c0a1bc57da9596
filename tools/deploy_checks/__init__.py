"""Checks on deploy/: what the schema of a manifest cannot know. Each check returns problems as single lines."""

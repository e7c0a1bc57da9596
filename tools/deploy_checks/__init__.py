"""Checks of deploy/ that go beyond the manifests' schemas. Each check returns problems as single lines."""

"""Pointsman's plug-ins for vLLM. They run inside an engine, and import nothing of the control plane."""

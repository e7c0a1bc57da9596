"""Pointsman's plug-ins for vLLM. They run inside an engine and import nothing from the control plane."""

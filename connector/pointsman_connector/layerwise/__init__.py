"""KV that is pushed while it is computed: layer by layer, chunk by chunk, to an engine that already waits for it."""

import os

# Mooncake logs a line for each write that it was asked after (`writes`). It reads this when it is loaded.
os.environ.setdefault("MC_LOG_LEVEL", "WARNING")

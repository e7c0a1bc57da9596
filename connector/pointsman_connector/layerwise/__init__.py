"""Layer-wise push: KV is sent while it is computed, layer by layer and chunk by chunk, to an engine that waits for it."""

import os

# Mooncake logs a line for each status query of a write (`sleeping_writes`). It reads this variable when it is loaded.
os.environ.setdefault("MC_LOG_LEVEL", "WARNING")

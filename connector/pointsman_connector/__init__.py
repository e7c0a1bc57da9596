"""Pointsman's plug-ins for vLLM. They run inside an engine and import nothing from the control plane."""

import os

# Over TCP, Mooncake rejects a write that has more pieces than its queue for the receiver has room for, 2,048 by default: those of
# 43 scattered blocks of 48 layers. This is the greatest value that it accepts. It reads the variable when it starts.
os.environ.setdefault("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", "65535")

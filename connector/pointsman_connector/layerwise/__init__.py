"""KV that is pushed while it is computed: layer by layer, chunk by chunk, to an engine that already waits for it."""

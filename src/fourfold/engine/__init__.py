"""The engine: scheduler, KV cache and loop over a Backend; in this process or in one of its own."""

"""The engine: scheduler, KV cache and loop over a Backend; in this process, a thread, or a process of its own."""

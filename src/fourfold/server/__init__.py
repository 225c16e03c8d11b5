"""The HTTP front: OpenAI-compatible endpoints over an `EngineClient`."""

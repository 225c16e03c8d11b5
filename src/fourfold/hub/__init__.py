"""Names of models to files on this machine."""

from fourfold.hub.names import ResolvedModel, resolve

__all__ = ["ResolvedModel", "resolve"]

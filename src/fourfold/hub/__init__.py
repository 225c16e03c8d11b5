"""Names of models to files on this machine."""

from fourfold.hub.names import ResolvedModel, resolve
from fourfold.hub.progress import Progress, silent

__all__ = ["Progress", "ResolvedModel", "resolve", "silent"]

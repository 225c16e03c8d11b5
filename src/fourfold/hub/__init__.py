"""Names of models to files on this machine."""

from fourfold.hub.progress import Progress, silent
from fourfold.hub.resolve import ResolvedModel, resolve

__all__ = ["Progress", "ResolvedModel", "resolve", "silent"]

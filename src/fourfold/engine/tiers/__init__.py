"""Where KV blocks go that the pool has no room for, and that shall outlive the process: host memory, disk."""

from fourfold.engine.tiers.disk import DiskStore
from fourfold.engine.tiers.host import HostPool
from fourfold.engine.tiers.tiers import Tiers, make_tiers

__all__ = ["DiskStore", "HostPool", "Tiers", "make_tiers"]

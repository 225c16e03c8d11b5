"""Weight formats: block layout, decode, split into integers and scales, encode."""

from fourfold.quant.block import BlockFormat, Groups
from fourfold.quant.registry import get_format

__all__ = ["BlockFormat", "Groups", "get_format"]

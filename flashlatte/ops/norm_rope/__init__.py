"""The elementwise part of an MLA layer: norms, rotation and unquantized cache writes, in two launches."""

from flashlatte.ops.norm_rope.api import latent_rows, rotate_heads
from flashlatte.ops.norm_rope.rotary import Rotary

__all__ = ["Rotary", "latent_rows", "rotate_heads"]

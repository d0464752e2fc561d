"""What an MLA layer does between its matrix products: norms, rotation, and plain cache writes, in two launches."""

from flashlatte.layers.elementwise.api import latent_rows, rotate_heads

__all__ = ["latent_rows", "rotate_heads"]

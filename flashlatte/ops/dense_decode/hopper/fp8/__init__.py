"""Dense decode with products in e4m3, for ``precision="fp8"``, on ``kernels.hopper.e4m3``."""

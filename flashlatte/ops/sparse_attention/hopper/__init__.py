"""The backward pass of sparse attention in Gluon for Hopper (SM90): docs/kernels/sparse-attention-backward.md has the
schedule."""

"""Dense prefill in Triton, forward and backward."""

"""Attention on several GPUs of one host, compared with one GPU. Run with torchrun."""

"""Host code below all operations: checks, dispatch, registration with PyTorch, launching, Triton versions."""

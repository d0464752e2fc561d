"""A process that keeps the SMs busy with products of matrices until it is ended."""

from __future__ import annotations

import torch

SIZE, CALLS_BEFORE_WAIT = 4096, 50


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    a, b = (torch.randn(SIZE, SIZE, dtype=torch.bfloat16, device=device) for _ in range(2))
    product = torch.empty_like(a)
    while True:
        for _ in range(CALLS_BEFORE_WAIT):
            torch.mm(a, b, out=product)
        product[0, 0].item()


if __name__ == "__main__":
    main()

"""The losses of a model's indexers: how they reach the model's output, and their gradients the layers.

A layer's loss is attached to the layer's attention output, and the backward pass of that output computes the indexer's
gradients too. So whatever computes a layer's backward pass includes its indexer: a checkpoint, also a reentrant one,
whose first pass records no graph, or FSDP, which gathers a layer's parameters for the backward pass of its output.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from transformers.utils.generic import ModelOutput

from flashlatte.runtime.torch_op import register_op

# Output of an enabled model with an indexer.
LOSS = "indexer_loss"


class IndexerLosses:
    """The losses of the layers in one step.

    Attributes:
        means: mean divergence of each layer's tokens; None after ``collect``. The backward pass of a checkpointed layer
            attaches its loss again.
        gradient: float32, 0-dimensional: in a backward pass, the gradient of the sum of ``means``.
    """

    def __init__(self, device: torch.device) -> None:
        self.means: list[torch.Tensor] | None = []
        self.gradient = torch.zeros((), dtype=torch.float32, device=device)

    def attach(self, out: torch.Tensor, loss: torch.Tensor, num_rows: torch.Tensor) -> torch.Tensor:
        """``out``, whose backward pass computes the gradients of ``loss / num_rows`` too."""
        # Also where it is not kept: a checkpoint must save the same tensors again.
        mean = loss / num_rows.clamp_min(1)
        if self.means is not None:
            self.means.append(mean.detach())
        return _Attach.apply(out, mean, self.gradient)

    def collect(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The decoder's output, through which gradients must flow first, and the sum over layers; None without losses.

        Raises:
            ValueError: the sum has no gradient, as under a reentrant checkpoint whose input requires none.
        """
        means, self.means = self.means or [], None
        if not means:
            return hidden, None
        if not hidden.requires_grad:
            raise ValueError(
                "a reentrant checkpoint around an indexer that learns must have an input that requires a gradient: "
                "call model.enable_input_require_grads(), or checkpoint with use_reentrant=False"
            )
        total = torch.stack([mean.to(hidden.device) for mean in means]).sum()
        return _Collect.apply(hidden, total, self.gradient)


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, mean: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        # Not save_for_backward: _Collect writes to it.
        ctx.gradient = gradient
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        gradient = ctx.gradient
        d_mean = torch.empty_like(gradient)
        _read_gradient(d_mean, gradient, d_out)
        return d_out, d_mean, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, total: torch.Tensor, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        ctx.gradient = gradient
        return hidden.view_as(hidden), total.clone()

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, d_hidden: torch.Tensor | None, d_total: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        # Layers that were compiled on their own saved the tensor, and would refuse another version of it.
        if d_total is None:
            ctx.gradient.data.zero_()
        else:
            ctx.gradient.data.copy_(d_total)
        return d_hidden, None, None


@register_op("read_indexer_gradient", mutates=("d_mean",))
def _read_gradient(d_mean: torch.Tensor, gradient: torch.Tensor, d_out: torch.Tensor | None) -> None:
    """Copy ``gradient``. The unused ``d_out`` keeps a compiled program from reading it in the forward pass."""
    d_mean.copy_(gradient)


class LossHooks:
    """Hooks that put the indexers' losses into the output of a decoder, and of the model around it.

    Args:
        argument: the argument of the decoder's call that holds the step.
        coefficient: factor of the loss in the model's own loss.
    """

    def __init__(self, argument: str, coefficient: float) -> None:
        self.argument, self.coefficient = argument, coefficient
        self._pending: torch.Tensor | None = None

    def end_decoder(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        step = kwargs.get(self.argument)
        self._pending = None
        if step is None or not step.losses.means:
            return
        _check_output(output)
        output["last_hidden_state"], self._pending = step.losses.collect(output["last_hidden_state"])
        output[LOSS] = self._pending

    def end_model(self, model: Any, args: tuple[Any, ...], output: Any) -> None:
        loss, self._pending = self._pending, None
        if loss is None:
            return
        _check_output(output)
        output[LOSS] = loss
        if output.get("loss") is not None:
            output["loss"] = output["loss"] + self.coefficient * loss.to(output["loss"].device)

    def __deepcopy__(self, memo: dict[int, Any]) -> LossHooks:
        # A pending loss has a graph, which cannot be copied.
        copied = memo[id(self)] = LossHooks(self.argument, self.coefficient)
        return copied


def _check_output(output: Any) -> None:
    if not isinstance(output, ModelOutput):
        raise ValueError(
            f"return_dict must be True for a model whose indexer learns: a {type(output).__name__} has no {LOSS}"
        )

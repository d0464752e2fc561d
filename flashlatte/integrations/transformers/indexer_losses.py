"""Adds the losses of a model's indexers to the model's output, and passes their gradients back to the layers.

A layer's loss is attached to the layer's attention output, and the backward pass of that output computes the indexer's
gradients too. The indexer is therefore part of the layer's backward pass under activation checkpointing (also the
reentrant one, whose first pass records no graph) and under FSDP, which gathers a layer's parameters for the backward
pass of its output.
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
        means: mean divergence of each layer's tokens; None after ``collect``, since recomputation of a checkpointed
            layer attaches its loss again.
        gradient: float32, 0-dimensional: in a backward pass, the gradient of the sum of ``means``.
    """

    def __init__(self, device: torch.device) -> None:
        self.means: list[torch.Tensor] | None = []
        self.gradient = torch.zeros((), dtype=torch.float32, device=device)

    def attach(self, out: torch.Tensor, loss: torch.Tensor, num_rows: torch.Tensor) -> torch.Tensor:
        """``out`` unchanged; its backward pass computes the gradients of ``loss / num_rows`` too."""
        # Also if the loss is not kept: recomputation of a checkpoint must save the same tensors.
        mean = loss / num_rows.clamp_min(1)
        if self.means is not None:
            self.means.append(mean.detach())
        return _Attach.apply(out, mean, self.gradient)

    def collect(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``hidden``, whose backward pass must run before the layers', and the sum over layers; None without losses.

        Raises:
            ValueError: the sum has no gradient, as under a reentrant checkpoint whose input requires none.
        """
        means, self.means = self.means or [], None
        if not means:
            return hidden, None
        if not hidden.requires_grad:
            raise ValueError(
                "a reentrant checkpoint around an indexer in training must have an input that requires a gradient: "
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
        # Separately compiled layers saved the tensor, and autograd would reject another version of it.
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
    """Hooks that add the indexers' losses to the output of a decoder, and of the model that contains it.

    Args:
        argument: name of the decoder's argument that holds the step.
        coefficient: factor of the indexers' loss in the model's own loss.
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
        # An attribute, not an item: the model may build its own output from the decoder's items.
        setattr(output, LOSS, self._pending)

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
            f"return_dict must be True for a model whose indexer is trained: a {type(output).__name__} has no {LOSS}"
        )

"""Launches of the Hopper kernels, and of portable kernels where there is no Hopper kernel."""

from __future__ import annotations

from flashlatte.kernels.hopper.mla_tiles import ROWS
from flashlatte.kernels.hopper.row_loads import BOX, LatentKeys
from flashlatte.ops.indexer_loss.hopper.gradients import IndexGradients
from flashlatte.ops.indexer_loss.hopper.index_kernel import index_kernel
from flashlatte.ops.indexer_loss.hopper.index_tiles import INDEX_DIM
from flashlatte.ops.indexer_loss.hopper.target_kernel import TargetHeads, attention_target_kernel
from flashlatte.ops.indexer_loss.portable.launch import IndexerLossLaunches
from flashlatte.ops.indexer_loss.reference import IndexerLossParams, IndexerLossResults
from flashlatte.runtime import checks
from flashlatte.runtime.strides import strides_in_use
from flashlatte.runtime.tma_descriptors import describe

# Slots of a program of the target kernel.
_SPLIT = 2048


def loss_and_gradients(params: IndexerLossParams, results: IndexerLossResults) -> None:
    checks.begins_aligned(q=params.q, kv=params.kv)
    _HopperLaunches(params, results).run()


class _HopperLaunches(IndexerLossLaunches):
    def sum_probabilities(self, first_token: int, tokens: int) -> None:
        q, kv, lse = self.params.q, self.params.kv, self.lse
        h_q, head_dim = q.shape[1:]
        described = describe(q, q.shape, strides_in_use(q), (1, ROWS.value, BOX.value))
        attention_target_kernel[(tokens * -(-self.slots.width // _SPLIT),)](
            TargetHeads(described, lse, lse.stride(0), lse.stride(1), h_q),
            LatentKeys(kv, kv.stride(0) // 8),
            self.slots,
            first_token=first_token,
            target=self.target,
            softmax_scale=self.params.softmax_scale,
            SPLIT=_SPLIT,
            HAS_ROPE=head_dim == 576,
            BLOCKS=-(-h_q // ROWS.value),
            num_warps=4,
        )

    def compute_loss(self, first_token: int, tokens: int) -> None:
        if not self._on_index_kernel:
            super().compute_loss(first_token, tokens)
            return
        results, params = self.results, self.params
        index_kernel[(tokens,)](
            self.slots,
            self.indexer,
            IndexGradients(results.d_index_q, results.d_index_k, results.d_index_weights),
            first_token=first_token,
            target=self.target,
            logits=self.logits,
            losses=self.losses,
            sees_keys=self.sees_keys,
            KEEP_GRADIENT=params.with_gradient,
            WITH_GRADIENT=params.with_gradient and not params.deterministic,
            num_warps=4,
        )

    def add_gradients(self, first_token: int, tokens: int) -> None:
        if not self._on_index_kernel or self.params.deterministic:
            super().add_gradients(first_token, tokens)

    @property
    def _on_index_kernel(self) -> bool:
        """Whether the index kernel computes the loss, and also the gradients unless they must be deterministic."""
        indexer = self.indexer
        sizes_fit = self.params.index_q.shape[2] == INDEX_DIM.value and indexer.h_i <= ROWS.value
        return self.params.indices is not None and sizes_fit and indexer.align == 8

"""DSA's two stages of training on a small layer: the indexer learns which tokens the attention needs.

The task is a lookup. A sequence has tokens that each hold a key and a value, four for each key, and then asks for the
value of every key. Attention must find the four tokens of 32 that hold the key of a question.

1. pre-training: dense attention learns the task; the indexer does not learn.
2. warm-up: attention stays dense, and only the indexer learns, from the divergence of its softmax from the attention.
3. sparse stage: a token attends to the eight tokens that the indexer selects, and everything learns, at a lower rate.
   The indexer's loss is then over the selected tokens only, so it does not see tokens that it misses.

Overlap is the share of the four tokens with the largest attention probabilities that the indexer selects, in the
questions of sequences that are not trained on. Selecting at random, it is about 0.2. The layer has no RoPE, since the
task does not depend on positions.
"""

import argparse
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from flashlatte.layers import IndexerConfig, MLAAttention, MLAConfig

KEYS, VALUES, COPIES, BATCH = 8, 8, 4, 16
LENGTH = KEYS * COPIES + KEYS
HIDDEN = 64
CONFIG = MLAConfig(
    hidden_size=HIDDEN,
    num_attention_heads=4,
    q_lora_rank=32,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=0,
    v_head_dim=16,
    indexer=IndexerConfig(num_heads=4, head_dim=32, topk=2 * COPIES),
)
BOUNDARIES = torch.arange(BATCH + 1) * LENGTH
# Steps and learning rate of each stage.
STAGES = {"pre-training": (100, 5e-3), "warm-up": (100, 5e-3), "sparse": (100, 5e-4)}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.keys, self.values = nn.Embedding(KEYS, HIDDEN), nn.Embedding(VALUES + 1, HIDDEN)
        self.norm, self.last_norm = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.attention = MLAAttention(CONFIG, dtype=torch.float32).requires_grad_(True)
        for weight in self.attention.parameters():
            nn.init.normal_(weight, std=weight.shape[-1] ** -0.5) if weight.dim() > 1 else nn.init.ones_(weight)
        nn.init.zeros_(self.attention.indexer.k_norm.bias)
        self.head = nn.Linear(HIDDEN, VALUES)

    def hidden(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return self.norm(self.keys(keys) + self.values(values))


def batches(seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(keys, values, answers) of the tokens of packed sequences; value ``VALUES`` is a question, answer -100 none."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        of_key = torch.randint(VALUES, (BATCH, KEYS), generator=generator)
        order = torch.rand(BATCH, KEYS * COPIES, generator=generator).argsort(dim=1) // COPIES
        asked = torch.rand(BATCH, KEYS, generator=generator).argsort(dim=1)
        question, none = torch.full_like(asked, VALUES), torch.full_like(order, -100)
        keys = torch.cat((order, asked), dim=1)
        values = torch.cat((of_key.gather(1, order), question), dim=1)
        answers = torch.cat((none, of_key.gather(1, asked)), dim=1)
        yield keys.flatten(), values.flatten(), answers.flatten()


def attention_probabilities(layer: MLAAttention, hidden: torch.Tensor) -> torch.Tensor:
    """The mean over heads [BATCH, LENGTH, LENGTH] of the probabilities of dense attention."""
    hidden = hidden.unflatten(0, (BATCH, LENGTH))
    q = layer.q_b_proj(layer.q_a_layernorm(layer.q_a_proj(hidden))).unflatten(-1, (CONFIG.num_attention_heads, -1))
    k, _ = (
        layer.kv_b_proj(layer.kv_a_layernorm(layer.kv_a_proj_with_mqa(hidden)))
        .unflatten(-1, (CONFIG.num_attention_heads, -1))
        .split((CONFIG.qk_nope_head_dim, CONFIG.v_head_dim), dim=-1)
    )
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * CONFIG.softmax_scale
    future = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    return scores.masked_fill(future, -torch.inf).softmax(dim=-1).mean(dim=1)


@torch.no_grad()
def evaluate(model: Model) -> tuple[float, float]:
    """The overlap, and the share of correct answers with sparse attention, in sequences that are not trained on."""
    keys, values, answers = next(batches(seed=1))
    hidden, is_question = model.hidden(keys, values), answers >= 0
    result = model.attention.forward_training(hidden, BOUNDARIES, LENGTH)
    heavy = attention_probabilities(model.attention, hidden).flatten(0, 1).topk(COPIES).indices
    first = torch.arange(BATCH * LENGTH) // LENGTH * LENGTH  # the first token of each token's sequence
    selected = result.indices[:, 0] - first[:, None]
    found = (heavy[:, :, None] == selected[:, None]).any(dim=2).float().mean(dim=1)
    predicted = model.head(model.last_norm(hidden + result.out)).argmax(dim=-1)
    return found[is_question].mean().item(), (predicted == answers)[is_question].float().mean().item()


def train(model: Model, log: list[tuple[str, float, float, float]]) -> None:
    """Run the stages; append (stage, loss of the task, loss of the indexer, overlap) of each step to ``log``."""
    examples, indexer = batches(seed=0), list(model.attention.indexer.parameters())
    of_indexer = {id(weight) for weight in indexer}
    others = [weight for weight in model.parameters() if id(weight) not in of_indexer]
    overlap, correct = evaluate(model)
    for stage, (steps, rate) in STAGES.items():
        for weights, learns in ((others, stage != "warm-up"), (indexer, stage != "pre-training")):
            for weight in weights:
                weight.requires_grad_(learns)
        optimizer = torch.optim.Adam([weight for weight in model.parameters() if weight.requires_grad], lr=rate)
        for step in range(steps):
            keys, values, answers = next(examples)
            hidden = model.hidden(keys, values)
            result = model.attention.forward_training(hidden, BOUNDARIES, LENGTH, dense=stage != "sparse")
            task = F.cross_entropy(model.head(model.last_norm(hidden + result.out)), answers)
            # The indexer's graph is separate: the sum trains each with its own loss.
            divergence = task.new_zeros(()) if result.indexer_loss is None else result.indexer_loss / result.num_rows
            optimizer.zero_grad()
            (task + divergence).backward()
            optimizer.step()
            if step % 5 == 4:
                overlap, correct = evaluate(model)
            if step % 25 == 24:
                print(
                    f"{stage:12} step {step + 1:3}: loss {task:.3f}, indexer's loss {divergence:.3f}, "
                    f"overlap {overlap:.2f}, correct with sparse attention {correct:.2f}"
                )
            log.append((stage, task.item(), divergence.item(), overlap))


def plot(log: list[tuple[str, float, float, float]], path: str) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (losses, overlaps) = pyplot.subplots(2, sharex=True)
    losses.plot([task for _, task, _, _ in log], label="task")
    losses.plot([divergence if stage != "pre-training" else None for stage, _, divergence, _ in log], label="indexer")
    losses.set_ylabel("loss")
    losses.legend()
    overlaps.plot([overlap for *_, overlap in log])
    overlaps.set(xlabel="step: pre-training, warm-up, sparse stage", ylabel="overlap", ylim=(0, 1.05))
    for axis in (losses, overlaps):
        for first in range(1, len(log)):
            if log[first][0] != log[first - 1][0]:
                axis.axvline(first, color="gray", linestyle=":")
    figure.savefig(path)
    print(f"wrote {path}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", metavar="FILE", help="write the losses and the overlap to an image (matplotlib)")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    model, log = Model(), []
    chance, _ = evaluate(model)
    print(f"overlap before training: {chance:.2f}")
    train(model, log)
    overlap, correct = evaluate(model)
    assert chance < 0.5, chance
    assert overlap > 0.9, overlap
    assert correct > 0.9, correct
    if options.plot:
        plot(log, options.plot)


if __name__ == "__main__":
    main()

"""Losses over logits whose vocabulary is shared by ranks: no rank has all logits of a token."""

from typing import Any

import torch
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function_unary

from zeroth import _C
from zeroth._C import reduce_from_group, vocab_cross_entropy
from zeroth.parallel._refuse import who
from zeroth.parallel.sample import IGNORED, shifted
from zeroth.parallel.tensor_cut import Cut
from zeroth.parallel.vocabulary import require_in_vocabulary

__all__ = ["VocabLoss", "cross_entropy_sum", "sum_of_parts"]


class VocabLoss:
    """The loss of transformers' causal language models over shared logits, in the place of model.loss_function."""

    def __init__(self, group: _C.Communicator, cut: Cut) -> None:
        self.group = group
        self.cut = cut

    def total(self, logits: torch.Tensor, labels: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """Sum of the cross entropies over tokens with a label. logits [N, own], labels [N] (IGNORED: none). On the
        wire: three numbers a token (Shoeybi et al. 2019, section 3). Whole logits [N, vocab_size] are taken, too."""
        sizes = self.cut.sizes(vocab_size)
        require_in_vocabulary(
            labels, vocab_size, what="a label", where="parallel.loss", who=who(self.group), ignored=IGNORED
        )
        if logits.shape[-1] == vocab_size != sizes[self.group.rank]:
            return cross_entropy_sum(logits, labels)
        return vocab_cross_entropy(logits, labels, self.group, ignore_index=IGNORED, reduction="sum", vocab_sizes=sizes)

    def __call__(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor | None,
        vocab_size: int,
        num_items_in_batch: torch.Tensor | float | None = None,
        ignore_index: int = IGNORED,
        shift_labels: torch.Tensor | None = None,
        **others: Any,
    ) -> torch.Tensor:
        """As transformers' ForCausalLMLoss: logits [B, S, own], labels [B, S], shifted here unless `shift_labels` are
        given. The mean over tokens with a label, or the sum divided by `num_items_in_batch`."""
        wanted = shifted(labels) if shift_labels is None and labels is not None else shift_labels
        assert wanted is not None
        flat = wanted.reshape(-1).to(logits.device)
        if ignore_index != IGNORED:
            flat = flat.masked_fill(flat == ignore_index, IGNORED)
        total = self.total(logits.reshape(-1, logits.shape[-1]), flat, vocab_size)
        if num_items_in_batch is not None:
            return total / num_items_in_batch
        return total / (flat != IGNORED).sum()


def cross_entropy_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The same of whole logits."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return functional.cross_entropy(wide, labels, ignore_index=IGNORED, reduction="sum")


def sum_of_parts(part: torch.Tensor, group: _C.Communicator) -> torch.Tensor:
    """The loss of which each rank has a part; its gradient is that of the own part. A function of torch's protocol, so
    that a TorchFunctionMode sees it."""
    if has_torch_function_unary(part):
        return handle_torch_function(sum_of_parts, (part,), part, group)
    return reduce_from_group(part, group)

"""A vocabulary whose rows or logits ranks share: what is outside of it, and logits of which a rank has a part."""

from typing import Any, NoReturn, TypeVar

import torch

from zeroth import _C
from zeroth._C import gather_from_group

__all__ = ["VocabLogits", "require_in_vocabulary"]


class OutsideVocabulary(_C.Error, IndexError):
    """As torch's own for an index."""


class NotWhole(_C.Error, AttributeError):
    """hasattr() is False."""


_Kind = TypeVar("_Kind", bound=_C.Error)


def _as(kind: type[_Kind], error: _C.Error) -> _Kind:
    made = kind(str(error))
    vars(made).update(vars(error))
    return made


def require_in_vocabulary(
    values: torch.Tensor,
    size: int,
    *,
    what: str,
    where: str,
    who: str = "",
    which: str = "",
    ignored: int | None = None,
) -> None:
    """Raises Error USAGE, which is an IndexError, too, for values that are not from 0 to size - 1. `ignored`: one that
    does not count."""
    if values.numel() == 0 or values.is_meta:
        return
    counted = values if ignored is None else values.masked_fill(values == ignored, 0)
    least, most = (int(one) for one in torch.aminmax(counted))
    if least >= 0 and most < size:
        return
    hint = "torch's own layers refuse it as well: look at the tokenizer, and at config.vocab_size"
    raise _as(
        OutsideVocabulary,
        _C.make_error(
            "USAGE",
            f"{what} is outside the vocabulary",
            where=where,
            who=who,
            which=which,
            expected=f"0 to {size - 1}" + ("" if ignored is None else f", or {ignored} for a token without a label"),
            got=str(least if least < 0 else most),
            hint=hint,
        ),
    )


class VocabLogits:
    """In the place of output.logits where a model trains with labels and ranks of tp share the vocabulary: the loss was
    computed from parts of the logits, and no rank has them whole. Whatever reads it as a tensor gets Error USAGE, which
    says so and is an AttributeError, too."""

    __slots__ = ("_group", "_sizes", "local", "rows")

    def __init__(self, local: torch.Tensor, group: _C.Communicator, sizes: list[int]) -> None:
        self.local = local
        """[..., own]: of this rank's rows"""
        begin = sum(sizes[: group.rank])
        self.rows = range(begin, begin + sizes[group.rank])
        """of the vocabulary that this rank has"""
        self._group = group
        self._sizes = sizes

    def whole(self) -> torch.Tensor:
        """[..., vocabulary], alike on all ranks of tp, known to autograd. A call of all of them; bytes: the logits that
        the others have."""
        return gather_from_group(self.local, -1, self._group, self._sizes)

    def __repr__(self) -> str:
        return (
            f"VocabLogits(rows {self.rows.start} to {self.rows.stop - 1} of a vocabulary of {sum(self._sizes)}, "
            f"shape {list(self.local.shape)}, rank {self._group.rank}/{self._group.size} of {self._group.name})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "VocabLogits":
        return self

    def __getattr__(self, name: str) -> NoReturn:
        self._refuse(name)

    def __getitem__(self, index: Any) -> NoReturn:
        self._refuse("[...]")

    def __len__(self) -> int:
        self._refuse("len()")

    def __iter__(self) -> NoReturn:
        self._refuse("iteration")

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("numpy")

    def __bool__(self) -> bool:
        return True  # as of an object that is not None

    def _arithmetic(self, other: Any = None) -> NoReturn:
        self._refuse("arithmetic")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _arithmetic
    __matmul__ = __rmatmul__ = __neg__ = __lt__ = __gt__ = __le__ = __ge__ = _arithmetic

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> NoReturn:
        found = [one for one in torch.utils._pytree.tree_leaves((args, kwargs or {})) if isinstance(one, cls)]
        found[0]._refuse(getattr(func, "__name__", "a function of torch"))

    def _refuse(self, what: str) -> NoReturn:
        raise _as(
            NotWhole,
            _C.make_error(
                "USAGE",
                "no rank has whole logits of a training forward with labels",
                where="parallel.forward",
                who=f"rank {self._group.rank}/{self._group.size} of {self._group.name}",
                which=f"output.logits, {what}",
                expected="output.logits.whole(), a call of all ranks of tp; or a forward in eval(), or without labels",
                got=f"rows {self.rows.start} to {self.rows.stop - 1} of {sum(self._sizes)} (output.logits.local)",
                hint="the loss is computed from three numbers a token, so that logits need not travel",
            ),
        )

"""That all ranks cut and schedule a pipeline in the same way."""

import collections
import hashlib
from collections.abc import Mapping

import torch

from zeroth import _C
from zeroth.parallel._refuse import refuse

__all__ = ["require_same"]

_SHOWN = 120
"""characters of a text that are shown from its first difference on"""


def require_same(facts: Mapping[str, str], mesh: _C.Mesh, *, where: str) -> None:
    """Compares texts, under the same names on all ranks, over the world. Raises Error MISMATCH on all of them: `who` is
    the rank that differs from most, with its stage, `which` the first text that differs. A call of all ranks; 8 bytes
    a text and rank, and the texts only where they differ."""
    world = mesh.world
    own = torch.tensor([_digest(text) for text in facts.values()] + [mesh.coordinate("pp")], dtype=torch.int64)
    every = world.all_gather(own[None]).tolist()
    for number, (name, text) in enumerate(facts.items()):
        digests = [record[number] for record in every]
        ((most, _),) = collections.Counter(digests).most_common(1)
        odd = next((rank for rank, digest in enumerate(digests) if digest != most), None)
        if odd is None:
            continue
        usual = digests.index(most)
        texts = [_told(text, rank, world) for rank in (usual, odd)]
        expected, got = _difference(*texts)
        places = [f"rank {rank}, stage {every[rank][-1]}" for rank in (usual, odd)]
        refuse(
            "ranks make different pipelines",
            code="MISMATCH",
            where=where,
            who=f"rank {odd}/{world.size}, stage {every[odd][-1]} of {mesh.size('pp')}",
            which=name,
            expected=f"{expected} ({places[0]})",
            got=f"{got} ({places[1]})",
            hint="give all ranks the same model, configuration and arguments of zeroth.pipeline(); of measured times, "
            "those of one rank, as `weights`",
        )


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def _told(own: str, rank: int, world: _C.Communicator) -> str:
    """The text of one rank. A call of all ranks."""
    data = torch.frombuffer(bytearray(own.encode()) or bytearray(1), dtype=torch.uint8)
    length = world.broadcast(torch.tensor([len(data)]), rank).item()
    return bytes(world.broadcast(data if world.rank == rank else data.new_empty(int(length)), rank).tolist()).decode()


def _difference(usual: str, odd: str) -> tuple[str, str]:
    """Both from a little before their first difference on, where they are long."""
    if max(len(usual), len(odd)) <= _SHOWN:
        return usual, odd
    first = next(
        (at for at, (left, right) in enumerate(zip(usual, odd, strict=False)) if left != right),
        min(len(usual), len(odd)),
    )
    begin = max(0, usual.rfind(" ", 0, max(first - 20, 0)))

    def part(text: str) -> str:
        end = begin + _SHOWN
        return ("..." if begin > 0 else "") + text[begin:end].strip() + ("..." if end < len(text) else "")

    return part(usual), part(odd)

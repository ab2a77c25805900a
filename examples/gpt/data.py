"""Real text as bytes: which files, which part is held out, which windows a rank sees in which step. The files, their
order, the split and the windows are those of examples/gpt_cpp/data.h."""

import dataclasses
import math
import os
import pathlib
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from errors import errno_text, make_error
from rng import counters, digest64, key_of, mix64_array
from torch import Tensor

Text = npt.NDArray[np.uint8]

TEXT_PROBE_BYTES = 8192
"""a zero byte among so many at its beginning makes a file binary"""
MIN_HELD_OUT_WINDOWS = 4
"""fewest windows of held-out text that give a validation loss worth reading"""


@dataclasses.dataclass(kw_only=True, slots=True, frozen=True)
class CorpusFile:
    name: str
    """path below the folder, with "/" """
    num_bytes: int
    digest: int
    """xxHash3 of the content"""

    def __str__(self) -> str:
        return f"{self.digest:016x} {self.num_bytes:>12} {self.name}"


@dataclasses.dataclass(kw_only=True, slots=True, frozen=True)
class Corpus:
    """The text in memory: all files one after the other, in the byte order of their names."""

    files: list[CorpusFile]
    num_binary: int
    """files left out because they hold zero bytes"""
    train: Text
    """the first 90 %"""
    held_out: Text
    """the rest, but at least MIN_HELD_OUT_WINDOWS windows"""
    digest: int
    """of all names, sizes and contents"""

    def __str__(self) -> str:
        binary = f", {self.num_binary} binary files left out" if self.num_binary else ""
        return (
            f"{len(self.files)} files, {format_bytes(len(self.train) + len(self.held_out))} of text (xxHash3 {self.digest:016x}), "  # noqa: E501
            f"{format_bytes(len(self.train))} to train on, {format_bytes(len(self.held_out))} held out{binary}"
        )


def format_bytes(num_bytes: int) -> str:
    """ "1023 B", "1.50 KiB", "12.0 MiB"."""
    if num_bytes < 1024:
        return f"{num_bytes} B"
    value = num_bytes / 1024
    units = iter(("KiB", "MiB", "GiB", "TiB"))
    unit = next(units)
    while value >= 1023.95 and unit != "TiB":  # 1023.95 and more would be printed as 1024.0
        value, unit = value / 1024, next(units)
    return f"{value:.2f} {unit}" if value < 9.995 else f"{value:.1f} {unit}"


def load_corpus(folder: pathlib.Path, suffixes: Sequence[str], exclude: Sequence[str], seq: int) -> Corpus:
    """Reads the text files below `folder` (links to folders are not followed) and splits off the last tenth, but at
    least MIN_HELD_OUT_WINDOWS windows of `seq` + 1 bytes. `suffixes`: empty takes every file that looks like text.
    Raises Error: IO for a folder or file that cannot be read, USAGE for no text or too little."""
    files: list[CorpusFile] = []
    contents: list[bytes] = []
    num_binary = 0
    for name in sorted(_list_files(folder, suffixes, exclude), key=os.fsencode):
        content = _read(folder / name)
        if b"\0" in content[:TEXT_PROBE_BYTES]:
            num_binary += 1
        elif content:
            files.append(CorpusFile(name=name, num_bytes=len(content), digest=digest64(content)))
            contents.append(content)
    if not files:
        wanted = f" that ends in {' or '.join(suffixes)}" if suffixes else ""
        raise make_error(
            "USAGE",
            "the data folder holds nothing to train on",
            which=str(folder),
            got=f"no text file{wanted} ({num_binary} binary files)",
            hint="give --data a folder with text files; --suffix and --exclude narrow the choice",
        )
    text = np.frombuffer(b"".join(contents), dtype=np.uint8)
    num_train = len(text) - max(len(text) // 10, MIN_HELD_OUT_WINDOWS * (seq + 1))
    if num_train < 2 * (seq + 1):
        raise make_error(
            "USAGE",
            "too little text for this sequence length",
            which=str(folder),
            expected=f"at least {(2 + MIN_HELD_OUT_WINDOWS) * (seq + 1)} bytes for --seq {seq}",
            got=f"{len(text)} bytes",
            hint="give --data more text or a smaller --seq",
        )
    table = b"".join(b"%s %d %016x\n" % (os.fsencode(file.name), file.num_bytes, file.digest) for file in files)
    return Corpus(
        files=files, num_binary=num_binary, train=text[:num_train], held_out=text[num_train:], digest=digest64(table)
    )


def train_windows(
    text_bytes: int, seq: int, batch: int, *, seed: int, step: int, micro_step: int, rank: int
) -> list[int]:
    """Starts of `batch` windows of `seq` + 1 bytes in a text of `text_bytes` (at least `seq` + 1), uniform and
    independent."""
    key = key_of(seed, step, micro_step, rank)
    starts = mix64_array(counters(key, 0, batch)) % np.uint64(text_bytes - seq)
    return [int(start) for start in starts]


def held_out_windows(text_bytes: int, seq: int, count: int) -> list[int]:
    """Starts of at most `count` windows of `seq` + 1 bytes, evenly spread, not overlapping; the same on all ranks."""
    available = text_bytes // (seq + 1)
    count = min(count, available)
    return [i * available // count * (seq + 1) for i in range(count)]


def make_batch(text: Text, starts: Sequence[int], seq: int) -> tuple[Tensor, Tensor]:
    """Bytes and the bytes after them, both int64 [len(starts), seq]."""
    windows = torch.from_numpy(np.stack([text[start : start + seq + 1] for start in starts]).astype(np.int64))
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def bigram_entropy(text: Text) -> float:
    """Entropy of a byte when the byte before it is known, in nats, from the pair counts of the text itself: what a
    table of byte pairs could reach at best. Ref: Shannon, "A Mathematical Theory of Communication", 1948, section 6
    (conditional entropy)."""
    pairs = text[:-1].astype(np.int64) * 256 + text[1:]
    counts = np.bincount(pairs, minlength=256 * 256).reshape(256, 256)
    total = 0.0  # of count(prev, next) * ln(count(prev) / count(prev, next))
    for row in counts.tolist():
        row_total = sum(row)
        for count in filter(None, row):
            total += count * math.log(row_total / count)
    return total / (len(text) - 1)


def _list_files(folder: pathlib.Path, suffixes: Sequence[str], exclude: Sequence[str]) -> Iterator[str]:
    """Names below the folder, in the file system's order."""
    if not folder.exists():
        raise make_error(
            "IO",
            "the data folder does not exist",
            which=str(folder),
            got="no such folder",
            hint="give --data a folder with text files",
        )
    if not folder.is_dir():
        raise make_error(
            "IO",
            "the data folder is not a folder",
            which=str(folder),
            got="a file",
            hint="give --data the folder that holds it",
        )

    def refuse(error: OSError) -> None:
        raise make_error("IO", "cannot read the data folder", which=str(folder), got=errno_text(error))

    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if name not in exclude]
        for name in names:
            path = pathlib.Path(parent, name)
            wanted = not suffixes or name.endswith(tuple(suffixes))
            if wanted and name not in exclude and path.is_file():  # a link to nothing is no file
                yield path.relative_to(folder).as_posix()


def _read(path: pathlib.Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise make_error(
            "IO", "cannot read a file of the data folder", which=str(path), got=errno_text(error)
        ) from error

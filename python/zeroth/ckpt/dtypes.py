"""Dtypes by their names in safetensors files, and roundings."""

import torch

from zeroth.ckpt.refusals import refused

__all__ = ["NAMES", "computed", "dtype_of", "name_of", "parse_dtype", "raw_bytes"]

NAMES: dict[str, torch.dtype] = {
    "C64": torch.complex64,
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAME_OF = {dtype: name for name, dtype in NAMES.items()}
_SHORT = {"fp32": "F32", "float32": "F32", "fp16": "F16", "float16": "F16", "half": "F16", "bf16": "BF16"}
_SHORT |= {"bfloat16": "BF16", "fp64": "F64", "float64": "F64"}


def dtype_of(name: str, which: str) -> torch.dtype:
    """Raises Error CHECKPOINT for a name that no dtype has."""
    if name not in NAMES:
        raise refused("a tensor has an unknown dtype", which=which, expected=", ".join(NAMES), got=name)
    return NAMES[name]


def name_of(dtype: torch.dtype, which: str) -> str:
    """Raises Error CHECKPOINT for a dtype that no checkpoint has."""
    if dtype not in _NAME_OF:
        raise refused("a tensor has a dtype that safetensors files do not have", which=which, got=str(dtype))
    return _NAME_OF[dtype]


def parse_dtype(text: str) -> torch.dtype:
    """Of a floating-point dtype, as people write it. Raises Error USAGE."""
    name = _SHORT.get(text.lower().removeprefix("torch."), text.upper())
    if name not in ("F64", "F32", "F16", "BF16"):
        raise refused(
            "weights cannot have this dtype", code="USAGE", which="dtype", expected="fp32, bf16, fp16 or fp64", got=text
        )
    return NAMES[name]


def computed(master: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The value with which a model computes whose master this is: to bfloat16 as engines round, halves away from zero;
    all else as torch does."""
    if master.dtype == torch.float32 and dtype == torch.bfloat16:
        bits = master.contiguous().view(torch.int32)
        rounded = ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
        return torch.where(master.isnan(), master.to(torch.bfloat16), rounded)
    return master.to(dtype)


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Its elements, row major, as a uint8 tensor of one dimension on the CPU."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)

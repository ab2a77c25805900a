"""The bytes of a tensor, for digests and checksums."""

import torch

__all__ = ["bytes_of"]


def bytes_of(tensor: torch.Tensor) -> memoryview | bytes:
    """Of its values in row-major order, whatever its dtype, device and layout in memory."""
    if tensor.numel() == 0:
        return b""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data

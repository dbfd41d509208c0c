from typing import Any

from torch import Tensor

torch_version: str
has_cuda: bool
compiler: str
wire_version: int
max_bin_size: int
max_payload_bytes: int

def is_non_overlapping_and_dense(tensor: Tensor) -> bool: ...
def inspect_payload(payload: Tensor, layout: Tensor | None = None) -> dict[str, Any]: ...
def layout_hash(layout: Tensor, grad: Tensor, bin_scales: bool, threshold_factor: float) -> int: ...
def describe_status(status: int) -> str: ...

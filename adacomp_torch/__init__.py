"""AdaComp gradient compression (Chen et al., AAAI 2018) as a DistributedDataParallel hook.

ddp = DistributedDataParallel(model)
state = AdaCompState(ddp)
ddp.register_comm_hook(state, adacomp_hook)
"""

import torch

from .version import __version__

_REBUILD = (
    "rebuild adacomp_torch with `pip install --no-build-isolation --force-reinstall --no-deps .`"
)

try:
    from . import _C
except ImportError as error:
    raise ImportError(
        f"adacomp_torch's extension does not load with torch {torch.__version__} ({error}): "
        f"{_REBUILD}"
    ) from error

# The C++ ABI follows torch's version: with another one calls would go wrong later and less clearly.
if torch.__version__.split("+")[0] != _C.torch_version.split("+")[0]:
    raise ImportError(
        f"adacomp_torch was built with torch {_C.torch_version}, but torch {torch.__version__} "
        f"is installed: {_REBUILD}"
    )

from . import layout, ops
from .hook import adacomp_hook
from .layout import default_bin_size
from .state import AdaCompState

has_cuda: bool = _C.has_cuda

__all__ = [
    "AdaCompState",
    "__version__",
    "adacomp_hook",
    "default_bin_size",
    "has_cuda",
    "layout",
    "ops",
]

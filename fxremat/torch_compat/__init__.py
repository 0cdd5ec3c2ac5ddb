"""The only package that uses private names of torch.

Each file wraps one part of torch; callers write ``torch_compat.NAME``. ``fxremat.torch_versions``
has the versions that are supported. If another version breaks something, it is fixed here.

Whatever uses torch imports this package, so its import checks the version of torch, before
anything that an old one lacks is imported.
"""

import torch as _torch

from fxremat.torch_versions import check as _check

_check(_torch.__version__)

from fxremat.torch_compat.allocator import *  # noqa: E402, F403
from fxremat.torch_compat.autograd import *  # noqa: E402, F403
from fxremat.torch_compat.callers import *  # noqa: E402, F403
from fxremat.torch_compat.collectives import *  # noqa: E402, F403
from fxremat.torch_compat.dynamo import *  # noqa: E402, F403
from fxremat.torch_compat.fakes import *  # noqa: E402, F403
from fxremat.torch_compat.graphs import *  # noqa: E402, F403
from fxremat.torch_compat.inductor import *  # noqa: E402, F403
from fxremat.torch_compat.joint import *  # noqa: E402, F403
from fxremat.torch_compat.kernels import *  # noqa: E402, F403
from fxremat.torch_compat.modes import *  # noqa: E402, F403
from fxremat.torch_compat.modules import *  # noqa: E402, F403
from fxremat.torch_compat.nested import *  # noqa: E402, F403
from fxremat.torch_compat.operators import *  # noqa: E402, F403
from fxremat.torch_compat.partitioner import *  # noqa: E402, F403
from fxremat.torch_compat.processes import *  # noqa: E402, F403
from fxremat.torch_compat.storages import *  # noqa: E402, F403
from fxremat.torch_compat.symbols import *  # noqa: E402, F403
from fxremat.torch_compat.user_kernels import *  # noqa: E402, F403

"""The only room that touches private torch names.

Each file wraps one part of torch; callers write ``torch_compat.NAME``. Checked on torch
2.11.0, 2.13.0 and 2.15.0; the supported range is 2.11 to 2.15. When another torch breaks
something, the repair belongs here.
"""

from fxremat.torch_compat.allocator import *  # noqa: F403
from fxremat.torch_compat.autograd import *  # noqa: F403
from fxremat.torch_compat.callers import *  # noqa: F403
from fxremat.torch_compat.collectives import *  # noqa: F403
from fxremat.torch_compat.dynamo import *  # noqa: F403
from fxremat.torch_compat.fakes import *  # noqa: F403
from fxremat.torch_compat.graphs import *  # noqa: F403
from fxremat.torch_compat.inductor import *  # noqa: F403
from fxremat.torch_compat.joint import *  # noqa: F403
from fxremat.torch_compat.kernels import *  # noqa: F403
from fxremat.torch_compat.modes import *  # noqa: F403
from fxremat.torch_compat.modules import *  # noqa: F403
from fxremat.torch_compat.partitioner import *  # noqa: F403
from fxremat.torch_compat.processes import *  # noqa: F403
from fxremat.torch_compat.storages import *  # noqa: F403
from fxremat.torch_compat.symbols import *  # noqa: F403
from fxremat.torch_compat.user_kernels import *  # noqa: F403

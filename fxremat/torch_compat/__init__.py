"""The only package that uses private names of torch.

Each file wraps one part of torch; callers write ``torch_compat.NAME``. The supported versions are
2.11 to 2.15; it was tested with torch 2.11.0, 2.13.0 and 2.15.0. If another version breaks
something, it is fixed here.
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
from fxremat.torch_compat.nested import *  # noqa: F403
from fxremat.torch_compat.partitioner import *  # noqa: F403
from fxremat.torch_compat.processes import *  # noqa: F403
from fxremat.torch_compat.storages import *  # noqa: F403
from fxremat.torch_compat.symbols import *  # noqa: F403
from fxremat.torch_compat.user_kernels import *  # noqa: F403

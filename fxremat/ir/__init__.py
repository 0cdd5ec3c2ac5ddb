"""Frozen data classes that all layers share. Nothing here imports torch.

Stages are counted from 0: stage ``i`` reads boundary ``i`` and writes boundary ``i + 1``. Stage
``l`` of the papers is stage ``l - 1`` here, and their ``a^l`` is boundary ``l``.
"""

from fxremat.ir.chain import *  # noqa: F403
from fxremat.ir.costs import *  # noqa: F403
from fxremat.ir.join import *  # noqa: F403
from fxremat.ir.link import *  # noqa: F403
from fxremat.ir.problem import *  # noqa: F403
from fxremat.ir.recorded import *  # noqa: F403
from fxremat.ir.schedule import *  # noqa: F403
from fxremat.ir.timeline import *  # noqa: F403
from fxremat.ir.training_state import *  # noqa: F403

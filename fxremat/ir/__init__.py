"""Plain frozen data that every layer shares. No torch here.

Stages are counted from 0: stage ``i`` reads boundary ``i`` and writes boundary
``i + 1``; the papers' stage ``l`` is stage ``l - 1`` here and their ``a^l`` is
boundary ``l``.
"""

from fxremat.ir.chain import *  # noqa: F403
from fxremat.ir.costs import *  # noqa: F403
from fxremat.ir.join import *  # noqa: F403
from fxremat.ir.link import *  # noqa: F403
from fxremat.ir.problem import *  # noqa: F403
from fxremat.ir.recorded import *  # noqa: F403
from fxremat.ir.schedule import *  # noqa: F403
from fxremat.ir.timeline import *  # noqa: F403

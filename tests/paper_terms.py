"""Chains, joins, costs and links as the papers write them."""

from __future__ import annotations

from collections.abc import Sequence

from fxremat.ir import Chain, Costs, Join, Link, Stage, StageCosts, Storage


def chain_from_sizes(boundary_bytes: Sequence[int], saved_bytes: Sequence[int]) -> Chain:
    """The papers' chain: boundaries that share nothing.

    Args:
        boundary_bytes: ``L + 1`` sizes ``ω_a^0 … ω_a^L``.
        saved_bytes: ``L`` sizes ``ω_ā^1 … ω_ā^L``, each counting ``a^l``.
    """
    storages = [Storage(n, f"a{i}") for i, n in enumerate(boundary_bytes)]
    stages = []
    for i, (total, after) in enumerate(zip(saved_bytes, boundary_bytes[1:], strict=True)):
        assert total >= after
        storages.append(Storage(total - after, f"s{i}"))
        stages.append(Stage(f"stage{i}", (i + 1, len(storages) - 1), i))
    boundaries = tuple((i,) for i in range(len(boundary_bytes)))
    return Chain(tuple(storages), boundaries, tuple(stages))


def costs_from_paper(
    *,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    gradient_bytes: Sequence[int],
    saved_bytes: Sequence[int],
    forward_extra_bytes: Sequence[int],
    backward_extra_bytes: Sequence[int],
    fixed_bytes: int = 0,
) -> Costs:
    """Costs in the papers' terms.

    Args:
        forward_s, backward_s: ``u_f^1 … u_f^L`` and ``u_b^1 … u_b^L``.
        gradient_bytes: ``L + 1`` sizes ``ω_δ^0 … ω_δ^L``.
        saved_bytes: ``ω_ā^1 … ω_ā^L``.
        forward_extra_bytes, backward_extra_bytes: ``o_f`` and ``o_b``; ``o_b``
            does not count ``δ^{l-1}``, which is added here.
        fixed_bytes: memory outside the chain.
    """
    stages = []
    for u_f, u_b, before, after, saved, o_f, o_b in zip(
        forward_s,
        backward_s,
        gradient_bytes[:-1],
        gradient_bytes[1:],
        saved_bytes,
        forward_extra_bytes,
        backward_extra_bytes,
        strict=True,
    ):
        stages.append(
            StageCosts(
                forward_s=u_f,
                backward_s=u_b,
                rebuild_s=u_f,
                gradient_bytes=after,
                forward_extra_bytes=o_f,
                keep_extra_bytes=o_f,
                backward_extra_bytes=o_b + before,
                rebuild_bytes=saved + max(o_f, o_b + before),
            )
        )
    return Costs(tuple(stages), fixed_bytes)


def join_from_sizes(
    branch_boundary_bytes: Sequence[Sequence[int]],
    branch_saved_bytes: Sequence[Sequence[int]],
    trunk_boundary_bytes: Sequence[int],
    trunk_saved_bytes: Sequence[int],
) -> Join:
    """A join whose boundaries share nothing.

    Args:
        branch_boundary_bytes, branch_saved_bytes: of each branch, for ``chain_from_sizes``.
        trunk_boundary_bytes: of the trunk *after* each of its stages: boundary 0 is
            the ends of the branches.
        trunk_saved_bytes: of each trunk stage, counting the boundary after it.
    """
    storages: list[Storage] = []
    parts: list[tuple[list[tuple[int, ...]], list[Stage]]] = []
    for line, (sizes, saved) in enumerate(
        zip(branch_boundary_bytes, branch_saved_bytes, strict=True)
    ):
        parts.append(_append_line(storages, f"b{line}.", sizes, saved))
    ends = tuple(i for boundaries, _ in parts for i in boundaries[-1])
    trunk = _append_line(storages, "t.", [0, *trunk_boundary_bytes], trunk_saved_bytes)
    trunk[0][0] = ends
    chains = [Chain(tuple(storages), tuple(b), tuple(s)) for b, s in (*parts, trunk)]
    return Join(tuple(chains[:-1]), chains[-1])


def _append_line(
    storages: list[Storage], prefix: str, sizes: Sequence[int], saved: Sequence[int]
) -> tuple[list[tuple[int, ...]], list[Stage]]:
    """Boundaries and stages of ``chain_from_sizes``, with storages appended to ``storages``."""
    line = chain_from_sizes(sizes, saved)
    base = len(storages)
    storages += [Storage(s.nbytes, prefix + s.name) for s in line.storages]
    stages = [
        Stage(prefix + s.name, tuple(i + base for i in s.saved), len(storages) + s.kind)
        for s in line.stages
    ]
    return [tuple(i + base for i in ids) for ids in line.boundaries], stages


def symmetric_link(bytes_per_s: float, *, shared: bool = False) -> Link:
    """The same bandwidth in both directions, ``β``."""
    return Link(bytes_per_s, bytes_per_s, shared)

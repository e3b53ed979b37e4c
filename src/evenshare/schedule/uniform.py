"""Closed-form plans of equal tiles."""

from evenshare.schedule.plan import UniformPlan


def uniform_plan(num_tiles: int, iters_per_tile: int, num_workers: int, split: bool = True) -> UniformPlan:
    """Level fill of `num_tiles` equal tiles: whole waves, then a tail of fewer than two tiles a worker in even shares."""
    if not split or iters_per_tile == 0 or num_tiles == 0 or num_tiles % num_workers == 0:
        return UniformPlan(num_workers, num_tiles, iters_per_tile, num_tiles)
    num_whole = max(num_tiles // num_workers - 1, 0) * num_workers
    return UniformPlan(num_workers, num_tiles, iters_per_tile, num_whole)

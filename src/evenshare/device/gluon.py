"""Gluon's names that differ between Triton versions, in one place, and what several kernels do to a tile."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Triton 3.6 calls the barrier over a partition's threads thread_barrier; from 3.7 on it is barrier.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@gluon.jit
def halves(x):
    """Left and right half of the columns of x, whose threads hold whole rows or pairs of columns: no register moves."""
    return gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), [0, 2, 1]))


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """The next buffer of a ring of STAGES, and the parity that its barriers wait for."""
    stage += 1
    phase = gl.where(stage == STAGES, phase ^ 1, phase)
    return gl.where(stage == STAGES, 0, stage), phase

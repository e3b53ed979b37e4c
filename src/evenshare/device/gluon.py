"""Gluon's names that differ between Triton versions, in one place."""

from triton.experimental.gluon import language as gl

# Triton 3.6 calls the barrier over a partition's threads thread_barrier; from 3.7 on it is barrier.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

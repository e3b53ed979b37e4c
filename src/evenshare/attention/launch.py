"""From a plan and tensors to kernel launches. Holds no policy."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any

import torch
import triton

from evenshare.attention.kernels import forward as forward_kernels
from evenshare.attention.kernels import tile_table as tile_table_kernels
from evenshare.attention.metadata import Batch
from evenshare.attention.problem import Problem
from evenshare.attention.tiles import (
    BOX_DIMS,
    FP8_BOX_DIMS,
    TileConfig,
    box_rows,
    next_power_of_2,
    padded_dim,
    portable_twin,
    q_box_tokens,
)
from evenshare.device.clock import CONSUMERS, TIME_COLUMNS
from evenshare.device.launcher import Box, Launch, get_launcher
from evenshare.device.workspace import Workspace
from evenshare.schedule.plan import Plan

if TYPE_CHECKING:
    from evenshare.attention.variants.variant import Variant

FORMS = {"ragged": 0, "paged": 1, "block_table": 2, "dense": 3}
REQUEST_BLOCKS = (128, 1024)  # requests that a step of the prefix sum takes: at least, at most
TILE_BLOCK = 128
PIECE_BYTES = 16  # of one cp.async, and what TMA wants strides to be multiples of
INTERPRETER_BLOCK = 16  # the interpreter's time grows with the block


def partial_elements(problem: Problem, tile: TileConfig) -> int:
    """fp32 values of one partial: o [block_m, block_dv] and lse [block_m]."""
    return tile.block_m * (_block_dim(problem.head_dim_v, tile) + 1)


def _block_dim(dim: int, tile: TileConfig) -> int:
    smallest = {"forward": 16, "hopper_decode_fp8": FP8_BOX_DIMS}  # 16: the smallest mma
    return padded_dim(dim, smallest.get(tile.kernel, BOX_DIMS))


def launch_tile_table(
    problem: Problem,
    tile: TileConfig,
    batch: Batch,
    tiles: torch.Tensor,
    iterations: torch.Tensor,
    num_tiles: torch.Tensor,
    status: torch.Tensor,
) -> None:
    """Device metadata -> tiles, iterations, their number and status, in place. No sync, no allocation."""
    max_tiles = tiles.shape[0]
    if tiles.device.type == "cpu":
        block = request_block = INTERPRETER_BLOCK
    else:
        low, high = REQUEST_BLOCKS
        block, request_block = TILE_BLOCK, min(max(next_power_of_2(batch.size), low), high)
    tile_table_kernels.tile_table[(max(triton.cdiv(max_tiles, block), 1),)](
        batch.qo_indptr if batch.qo_indptr is not None else status,  # a placeholder
        batch.kv_indptr if batch.kv_indptr is not None else status,
        batch.kv_lens if batch.kv_lens is not None else status,
        tiles,
        iterations,
        num_tiles,
        status,
        batch.size,
        max_tiles,
        batch.table_stride,
        batch.table_width,
        batch.num_indices,
        problem.window_left,
        HAS_QO=batch.qo_indptr is not None,
        FORM=FORMS[batch.form],
        PAGE_SIZE=problem.page_size,
        GROUP=problem.group_size,
        CAUSAL=problem.causal,
        HAS_WINDOW=problem.window_left >= 0,
        HEADS=problem.num_kv_heads // tile.heads_per_row(problem),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK=block,
        REQUEST_BLOCK=request_block,
    )


class ForwardLauncher:
    """The forward kernel of one plan, for all its layers and steps: it holds the plan's arrays, which stay."""

    def __init__(
        self,
        problem: Problem,
        tile: TileConfig,
        plan: Plan,
        tiles: torch.Tensor,
        workspace: Workspace,
        status: torch.Tensor,
    ) -> None:
        self.problem, self.tile, self.plan, self.workspace = problem, tile, plan, workspace
        self.tiles, self.status = tiles, status
        self.times: torch.Tensor | None = None

    def timed(self) -> ForwardLauncher:
        """The same launcher, whose kernels also note when they do what, in `times` (`device.clock`)."""
        twin = copy(self)
        shape = (self.plan.max_segments, CONSUMERS.value, TIME_COLUMNS.value)
        twin.times = torch.zeros(shape, dtype=torch.int64, device=self.tiles.device)
        return twin

    def bind(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        scales: tuple[torch.Tensor, ...],
        num_indices: int,
        lse_scale: float,
    ) -> Launch:
        """A launch for tensors laid out like these; it is called with (q, k, v, out, lse, kv_indices, *scales).

        q, out: [tokens, Hq, D] or dense [B, S, Hq, D]; k, v: pages [num_pages, page_size, Hkv, D], [tokens, Hkv, D] or dense.
        scales: k_scale (times that of an fp8 q) and v_scale, of one element or one for each KV head, if k and v are fp8.
        Without lse or pages the call passes any other array, which the kernel does not touch.
        """
        if self.plan.num_workers == 0 or self.tiles.shape[0] == 0 or out.numel() == 0:
            return _launch_nothing
        call = (q, k, v, out, lse, scales, num_indices, lse_scale)
        if self.tile.kernel == "forward":
            return self._bind_portable(self.tile, *call)
        portable = self._bind_portable(portable_twin(self.tile), *call)
        if not all(has_whole_pieces(t) for t in (q, k, v)):
            return portable
        hopper = self._bind_hopper(*call)

        def launch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: torch.Tensor) -> None:
            # Addresses change from call to call, and the Hopper kernels copy pieces of 16 bytes.
            aligned = (q.data_ptr() | k.data_ptr() | v.data_ptr()) % PIECE_BYTES == 0
            (hopper if aligned else portable)(q, k, v, *others)

        return launch

    def _bind_portable(
        self,
        tile: TileConfig,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        scales: tuple[torch.Tensor, ...],
        num_indices: int,
        lse_scale: float,
    ) -> Launch:
        variant = self.problem.variant
        launcher = get_launcher(
            forward_kernels.forward,
            6 + len(scales),
            **self._constants(tile, q, lse),
            SAME_STRIDES=k.stride()[:-2] == v.stride()[:-2],
            BLOCK_M=tile.block_m,
            NUM_STAGES=tile.num_stages,
            PRECISION="ieee",
            **_variant_functions(variant),
            num_warps=tile.num_warps,
        )
        static = self._static(tile, q, k, v, out, lse, num_indices, lse_scale)
        # Of 16-bit keys the kernel takes no scales, which costs nothing at run time.
        static = (*static, *_scale_strides(scales)) if scales else (None, None, *static, 0, 0)
        static = (*static, variant and variant.arguments)
        return launcher.bind(q.device, (self.plan.num_workers,), static)

    def _bind_hopper(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        scales: tuple[torch.Tensor, ...],
        num_indices: int,
        lse_scale: float,
    ) -> Launch:
        from evenshare.attention.kernels import hopper_decode, hopper_decode_fp8, hopper_prefill

        problem, tile = self.problem, self.tile
        widens = tile.kernel == "hopper_prefill" and problem.fp8_kv  # the producer, which then copies every row itself
        box = 0 if widens else box_rows(problem, tile.block_n)
        boxes: dict[int, Box] = {}
        if box and k.numel() and v.numel():
            boxes = {1: key_box(k, box), 2: key_box(v, box)}
        constants = self._constants(tile, q, lse)
        gathers = not boxes
        constants |= {"GATHER": gathers, "BOX": box, "STAGES": tile.num_stages}
        constants |= {"num_warps": tile.num_warps, "launch_pdl": True}
        if tile.kernel == "hopper_decode":
            launcher = get_launcher(hopper_decode.decode, 6, **constants, BLOCK_M=tile.block_m)
        elif tile.kernel == "hopper_decode_fp8":
            registers = {"CONSUMER_REGISTERS": 208 if gathers else 232, "PRODUCER_REGISTERS": 88 if gathers else 40}
            launcher = get_launcher(hopper_decode_fp8.decode, 8, **constants, **registers, BLOCK_M=tile.block_m)
        else:
            q_box = q_box_tokens(problem) if q.dtype == out.dtype else 0
            if q_box:
                boxes[0] = _q_box(q, problem.group_size, q_box)
            # Of 65536: two groups of four warps consume; TMA takes one warp and few registers, gathering takes four.
            registers = {"CONSUMER_REGISTERS": 224 if gathers else 232, "PRODUCER_REGISTERS": 56 if gathers else 40}
            launcher = get_launcher(
                hopper_prefill.prefill, 6 + len(scales), **constants, **registers, Q_BOX=q_box, Q_BUFFERS=tile.q_buffers
            )
        static = self._static(tile, q, k, v, out, lse, num_indices, lse_scale)
        if scales:
            static = (*static, *_scale_strides(scales))
        elif tile.kernel == "hopper_prefill":
            static = (None, None, *static, 0, 0)
        return launcher.bind(q.device, (self.plan.num_workers,), static, boxes)

    def _constants(self, tile: TileConfig, q: torch.Tensor, lse: torch.Tensor | None) -> dict[str, Any]:
        problem = self.problem
        return {
            "GROUP": problem.group_size,
            "HEAD_DIM": problem.head_dim,
            "HEAD_DIM_V": problem.head_dim_v,
            "PAGE_SIZE": problem.page_size,
            "DENSE": q.dim() == 4,
            "CAUSAL": problem.causal,
            "HAS_WINDOW": problem.window_left >= 0,
            "HAS_SOFT_CAP": problem.logits_soft_cap > 0,
            "HAS_LSE": lse is not None,
            "BLOCK_N": tile.block_n,
            "BLOCK_D": _block_dim(problem.head_dim, tile),
            "BLOCK_DV": _block_dim(problem.head_dim_v, tile),
        }

    def _static(
        self,
        tile: TileConfig,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        num_indices: int,
        lse_scale: float,
    ) -> tuple[Any, ...]:
        problem, plan, workspace = self.problem, self.plan, self.workspace
        dense, paged = q.dim() == 4, k.dim() == 4  # or dense
        partial_o = workspace.partials
        partial_lse = partial_o[plan.max_slots * tile.block_m * _block_dim(problem.head_dim_v, tile) :]
        return (
            plan.worker_indptr,
            plan.segments,
            self.tiles,
            partial_o,
            partial_lse if plan.max_slots else partial_o,
            workspace.counters,
            self.status,
            self.times,
            problem.sm_scale,
            problem.logits_soft_cap,
            lse_scale,
            problem.window_left,
            tile.heads_per_row(problem),
            q.shape[0],
            q.shape[1] if dense else q.shape[0],
            k.shape[0],
            num_indices,
            *_strides(q, dense),
            *_strides(k, paged),
            *_strides(v, paged),
            *_strides(out, dense),
            *(_strides(lse, dense) if lse is not None else (0, 0, 0)),
        )


def _variant_functions(variant: Variant | None) -> dict[str, Any]:
    if variant is None:
        functions = dict.fromkeys(("VARIANT", "SINK", "QUERY", "KEY", "VALUE", "OUTPUT"))
        return {**functions, "BASE_2": True, "SOFTMAX": True}
    functions = {name.upper(): variant.functions[name] for name in ("sink", "query", "key", "value", "output")}
    return {"VARIANT": variant.modify, **functions, "BASE_2": variant.scores_in_base_2, "SOFTMAX": variant.softmax}


def key_box(t: torch.Tensor, rows: int) -> Box:
    """Boxes of `rows` keys and 128 bytes of one KV head of [pages or requests, tokens, heads, dims] or [tokens, heads, dims]."""
    from triton.experimental.gluon.language import NVMMASharedLayout

    t = (t if t.dim() == 4 else t.unsqueeze(0)).transpose(1, 2)
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * t.element_size(), rank=4)
    return Box(tuple(t.shape), tuple(t.stride()), (1, 1, rows, 2 * BOX_DIMS // t.element_size()), layout)


def _q_box(q: torch.Tensor, group: int, tokens: int) -> Box:
    """Boxes of `tokens` tokens and 128 bytes of the query heads of one KV head."""
    from triton.experimental.gluon.language import NVMMASharedLayout

    q = q.unflatten(-2, (-1, group))
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=q.dim())
    return Box(tuple(q.shape), tuple(q.stride()), (1,) * (q.dim() - 4) + (tokens, 1, group, BOX_DIMS), layout)


def has_whole_pieces(t: torch.Tensor) -> bool:
    """Whether every row begins at a multiple of 16 bytes from the first, and no dimension repeats its values."""
    piece = PIECE_BYTES // t.element_size()
    dims = zip(t.shape[:-1], t.stride()[:-1], strict=True)
    return all(stride % piece == 0 and (stride > 0 or size == 1) for size, stride in dims)


def _strides(t: torch.Tensor, batched: bool) -> tuple[int, ...]:
    strides = t.stride()
    return strides[:3] if batched else (strides[0], *strides[:2])


def _scale_strides(scales: tuple[torch.Tensor, ...]) -> tuple[int, ...]:
    """From one KV head to the next."""
    return tuple(0 if scale.numel() == 1 else scale.stride(0) for scale in scales)


def _launch_nothing(*_: torch.Tensor | None) -> None:
    pass

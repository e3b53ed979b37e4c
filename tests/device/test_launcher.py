"""The launcher asks Triton's binder once per specialisation, and then gives the C launcher what Triton would have given it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.compiler import CompiledKernel
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.runtime.jit import JITFunction

from evenshare.device import launcher as launcher_module
from evenshare.device.launcher import MAX_TENSOR_MAPS, Box, Launch, Launcher, get_launcher

CUDA = torch.device("cuda", 0)
STREAM = 77


def scale(x_ptr, out_ptr, bias_ptr, factor, stride, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i * stride, mask=i < count, other=0.0)
    tl.store(out_ptr + i, x * factor + tl.load(bias_ptr), mask=i < count)


@gluon.jit
def copy_box(x_desc, out_desc, row, ROWS: gl.constexpr, num_warps: gl.constexpr):  # type: ignore[no-untyped-def]
    rows = gl.allocate_shared_memory(x_desc.dtype, [ROWS, 64], x_desc.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    mbarrier.expect(bar, x_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(x_desc, [row, 0], bar, rows)
    mbarrier.wait(bar, 0)
    tma.async_copy_shared_to_global(out_desc, [0, 0], rows)
    tma.store_wait(0)


class CLauncher:
    """Notes (grid, stream) and the kernel's arguments."""

    def __init__(self, calls: list[Any], one_for_all: bool) -> None:
        self.calls, self.one_for_all = calls, one_for_all

    def __call__(self, *arguments: Any) -> None:
        self.calls.append((arguments[:4], arguments[-1] if self.one_for_all else arguments[13:]))


class FakeCompiled(CompiledKernel):
    """A compiled kernel in Triton 3.7's form, one C launcher for all kernels, or in 3.6's, one per signature."""

    run = None

    def __init__(self, calls: list[Any], one_for_all: bool, scratch: int) -> None:
        self.function, self.packed_metadata = 4242, (4, 1, 0)
        self.metadata = SimpleNamespace(tensordesc_meta=[{}, {}])
        signature = {"arg_annotations": (), "kernel_signature": b""} if one_for_all else {}
        self.run = SimpleNamespace(
            launch=CLauncher(calls, one_for_all), launch_cooperative_grid=False, launch_pdl=False,
            global_scratch_size=scratch, profile_scratch_size=0, **signature,
        )  # fmt: skip


class Fake:
    """A kernel without a GPU: how often the binder ran, and what the C launcher was given since."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, one_for_all: bool = True, scratch: int = 0) -> None:
        self.kernel = JITFunction(scale, do_not_specialize=["count"])
        self.binder_calls: list[tuple[Any, ...]] = []
        self.calls: list[Any] = []
        self.current_device = 0

        def run(*arguments: Any, grid: Any, warmup: bool, **constants: Any) -> FakeCompiled:
            self.binder_calls.append(arguments)
            return FakeCompiled(self.calls, one_for_all, scratch)

        monkeypatch.setattr(self.kernel, "run", run)
        active = SimpleNamespace(
            get_current_device=lambda: self.current_device, get_current_stream=lambda device: STREAM + device
        )
        monkeypatch.setattr(launcher_module, "driver", SimpleNamespace(active=active))
        self.launcher = Launcher(self.kernel, 2, {"BLOCK": 16, "num_warps": 4})
        self.x, self.out, self.bias = (torch.zeros(64) for _ in range(3))

    def bind(self, factor: float = 2.0, stride: int = 3, count: int = 9, **options: Any) -> Launch:
        return self.launcher.bind(CUDA, (5,), (self.bias, factor, stride, count), **options)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    return Fake(monkeypatch)


@pytest.mark.parametrize("one_for_all", [True, False])
def test_the_binder_runs_once_and_the_c_launcher_gets_addresses(
    monkeypatch: pytest.MonkeyPatch, one_for_all: bool
) -> None:
    fake = Fake(monkeypatch, one_for_all)
    launch = fake.bind()
    for _ in range(3):
        launch(fake.x, fake.out)
    assert len(fake.binder_calls) == 1
    assert fake.binder_calls[0] == (fake.x, fake.out, fake.bias, 2.0, 3, 9)
    arguments = (fake.x.data_ptr(), fake.out.data_ptr(), fake.bias.data_ptr(), 2.0, 3, 9, None)
    assert fake.calls == [((5, 1, 1, STREAM), arguments)] * 2


def test_a_tuple_of_arguments_keeps_its_form(fake: Fake) -> None:
    launch = fake.launcher.bind(CUDA, (5,), ((fake.bias, 7, (1, None)), 2.0, 3, 9))
    for _ in range(2):
        launch(fake.x, fake.out)
    arguments = (fake.x.data_ptr(), fake.out.data_ptr(), (fake.bias.data_ptr(), 7, (1, None)), 2.0, 3, 9, None)
    assert fake.calls == [((5, 1, 1, STREAM), arguments)]
    other = fake.launcher.bind(CUDA, (5,), ((fake.bias, 1, (1, None)), 2.0, 3, 9))
    other(fake.x, fake.out)
    assert len(fake.binder_calls) == 2, "another specialisation of a part is another kernel"


def test_another_tensor_of_the_same_kind_needs_no_binder(fake: Fake) -> None:
    launch, other = fake.bind(), torch.zeros(64)
    launch(fake.x, fake.out)
    launch(other, fake.out)
    assert len(fake.binder_calls) == 1
    assert fake.calls[0][1][0] == other.data_ptr()


ELSEWHERE = SimpleNamespace(data_ptr=lambda: 4096, dtype=torch.float32, get_device=lambda: 1)


@pytest.mark.parametrize("x", [torch.zeros(64)[1:], torch.zeros(64).half(), ELSEWHERE, None])
def test_alignment_dtype_device_and_none_are_in_the_key(fake: Fake, x: Any) -> None:
    launch = fake.bind()
    launch(fake.x, fake.out)
    for count in (2, 2):
        launch(x, fake.out)
        assert len(fake.binder_calls) == count
    launch(fake.x, fake.out)
    assert len(fake.binder_calls) == 2


@pytest.mark.parametrize(
    ("change", "binder_calls"),
    [
        ({"stride": 5}, 1),
        ({"stride": 1}, 2),  # a constant
        ({"stride": 32}, 2),  # divisible by 16
        ({"stride": 2**31 + 1}, 2),  # 64 bits wide
        ({"factor": 7.0}, 1),
        ({"count": 16}, 1),  # do_not_specialize
        ({"count": 1}, 1),
        ({"count": 2**31}, 2),
    ],
)
def test_numbers_are_in_the_key_as_triton_specialises_on_them(
    fake: Fake, change: dict[str, Any], binder_calls: int
) -> None:
    fake.bind()(fake.x, fake.out)
    launch = fake.bind(**change)
    launch(fake.x, fake.out)
    launch(fake.x, fake.out)
    assert len(fake.binder_calls) == binder_calls
    assert fake.calls[-1][1][3:6] == tuple(({"factor": 2.0, "stride": 3, "count": 9} | change).values())


def test_alignment_of_a_bound_array_is_in_the_key(fake: Fake) -> None:
    fake.bind()(fake.x, fake.out)
    fake.bias = fake.bias[1:]
    fake.bind()(fake.x, fake.out)
    assert len(fake.binder_calls) == 2


def test_constants_have_a_launcher_each() -> None:
    kernel = JITFunction(scale)
    assert get_launcher(kernel, 2, BLOCK=16) is get_launcher(kernel, 2, BLOCK=16)
    assert get_launcher(kernel, 2, BLOCK=16) is not get_launcher(kernel, 2, BLOCK=32)


def test_the_tensors_device_becomes_the_current_one(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    class Device:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            self.before, fake.current_device = fake.current_device, self.index

        def __exit__(self, *_: Any) -> None:
            fake.current_device = self.before

    monkeypatch.setattr(torch.cuda, "device", Device)
    launch = fake.launcher.bind(torch.device("cuda", 3), (5,), (fake.bias, 2.0, 3, 9))
    launch(fake.x, fake.out)
    launch(fake.x, fake.out)
    assert fake.current_device == 0
    assert fake.calls[0][0] == (5, 1, 1, STREAM + 3)


def test_a_profilers_hook_sees_every_launch(fake: Fake) -> None:
    launch = fake.bind()
    launch(fake.x, fake.out)
    hook = triton.knobs.runtime.launch_enter_hook
    listener = len
    hook.add(listener)
    try:
        launch(fake.x, fake.out)
    finally:
        hook.remove(listener)
    launch(fake.x, fake.out)
    assert (len(fake.binder_calls), len(fake.calls)) == (2, 1)


def test_a_kernel_with_scratch_memory_stays_with_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(monkeypatch, scratch=128)
    launch = fake.bind()
    launch(fake.x, fake.out)
    launch(fake.x, fake.out)
    assert (len(fake.binder_calls), len(fake.calls)) == (2, 0)


@pytest.fixture
def maps(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The descriptors for which a tensor map was made."""
    from triton.backends.nvidia import driver

    made: list[Any] = []

    def make_tensordesc_arg(descriptor: Any, metadata: Any) -> list[Any]:
        made.append(descriptor)
        return [("map", descriptor.base.data_ptr()), *descriptor.shape, *descriptor.strides]

    monkeypatch.setattr(driver, "make_tensordesc_arg", make_tensordesc_arg)
    return made


def make_box(rows: int = 64, block: int = 32) -> Box:
    return Box((rows, 64), (64, 1), (block, 64), gl.NVMMASharedLayout(128, 16, 2))


def test_a_tensor_map_is_made_once_per_address_and_box(fake: Fake, maps: list[Any]) -> None:
    pages, box = torch.zeros(2, 64, 64, dtype=torch.float16), make_box()
    launch = fake.bind(boxes={0: box})
    launch(pages[0], fake.out)
    assert fake.binder_calls[0][0].base is not None  # Triton's own descriptor
    for page in (pages[0], pages[1], pages[0], pages[1]):
        launch(page, fake.out)
        assert fake.calls[-1][1][:6] == (("map", page.data_ptr()), 64, 64, 64, 1, fake.out.data_ptr())
    assert (len(maps), len(fake.binder_calls)) == (2, 1)
    fake.bind(boxes={0: make_box(rows=48)})(pages[0], fake.out)  # of another extent: another map, the same kernel
    assert (len(maps), len(fake.binder_calls)) == (3, 1)
    fake.bind(boxes={0: make_box(block=16)})(pages[0], fake.out)
    assert len(fake.binder_calls) == 2


def test_two_boxes_keep_their_places(fake: Fake, maps: list[Any]) -> None:
    pages = torch.zeros(2, 64, 64, dtype=torch.float16)
    launch = fake.bind(boxes={0: make_box(), 1: make_box(rows=48)})
    launch(*pages)
    launch(*pages)
    first, second = (("map", page.data_ptr()) for page in pages)
    assert fake.calls[0][1][:10] == (first, 64, 64, 64, 1, second, 48, 64, 64, 1)


def test_few_tensor_maps_are_kept(fake: Fake, maps: list[Any]) -> None:
    pages, box = torch.zeros(MAX_TENSOR_MAPS + 8, 64, 64, dtype=torch.float16), make_box()
    launch = fake.bind(boxes={0: box})
    for page in (*pages, *pages[:1]):
        launch(pages[0], fake.out)
        launch(page, fake.out)
    assert len(maps) == MAX_TENSOR_MAPS + 8  # pages[0] was always in use


def test_a_descriptor_among_the_bound_arguments(fake: Fake, maps: list[Any]) -> None:
    pages = torch.zeros(64, 64, dtype=torch.float16)
    fake.bias = make_box().describe(pages)
    launch = fake.bind()
    launch(fake.x, fake.out)
    launch(fake.x, fake.out)
    assert fake.calls[0][1][2:7] == (("map", pages.data_ptr()), 64, 64, 64, 1)


def test_results(device: torch.device) -> None:
    """In the interpreter, and on the GPU: the second launch does without the binder."""
    launcher = Launcher(triton.jit(scale), 2, {"BLOCK": 64})
    bias = torch.full((1,), 0.5, device=device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    launch = launcher.bind(device, (1,), (bias, 2.0, 1, 60))
    for offset in (0, 0, 1, 1, 4):  # 1: not aligned to 16 bytes
        x, out = torch.randn(80, device=device)[offset:], torch.zeros(64, device=device)
        launch(x, out)
        torch.testing.assert_close(out[:60], x[:60] * 2 + 0.5)
        assert (out[60:] == 0).all()


@pytest.fixture
def gpu() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.gpu
def test_the_binder_is_skipped_on_a_gpu(gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel: Any = triton.jit(scale)
    x, out, bias = torch.randn(64, device=gpu), torch.zeros(64, device=gpu), torch.zeros(1, device=gpu)
    launch = Launcher(kernel, 2, {"BLOCK": 64}).bind(gpu, (1,), (bias, 3.0, 1, 64))
    launch(x, out)
    monkeypatch.setattr(kernel, "run", None)
    out.zero_()
    launch(x, out)
    torch.testing.assert_close(out, x * 3)
    with pytest.raises(TypeError):  # not aligned: another specialisation
        launch(torch.zeros(65, device=gpu)[1:], out)


@pytest.mark.gpu
def test_streams_and_graphs(gpu: torch.device) -> None:
    x, bias = torch.randn(64, device=gpu), torch.zeros(1, device=gpu)
    outs = torch.zeros(3, 64, device=gpu)
    launch = Launcher(triton.jit(scale), 2, {"BLOCK": 64}).bind(gpu, (1,), (bias, 3.0, 1, 64))
    launch(x, outs[0])
    launch(x, outs[0])
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(gpu)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        x.add_(1.0)
        launch(x, outs[1])  # after the addition, so on its stream
    stream.synchronize()
    torch.testing.assert_close(outs[1], x * 3)
    with torch.cuda.graph(graph):
        launch(x, outs[2])
    assert (outs[2] == 0).all()
    x.mul_(2.0)
    graph.replay()
    torch.testing.assert_close(outs[2], x * 3)


@pytest.mark.gpu
def test_tensor_maps_on_a_gpu(gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.get_device_capability(gpu)[0] != 9:
        pytest.skip("the kernel is Hopper's")
    kernel: Any = copy_box
    pages, out = torch.randn(3, 64, 64, device=gpu).half(), torch.zeros(32, 64, device=gpu).half()
    boxes = {0: make_box(), 1: make_box(rows=32)}
    launch = Launcher(kernel, 2, {"ROWS": 32, "num_warps": 4}).bind(gpu, (1,), (32,), boxes)
    launch(pages[0], out)
    monkeypatch.setattr(kernel, "run", None)
    for page in (pages[0], pages[1], pages[2], pages[1]):
        launch(page, out.zero_())
        assert torch.equal(out, page[32:])


@pytest.mark.gpu
def test_a_second_device(gpu: torch.device) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    launcher = Launcher(triton.jit(scale), 2, {"BLOCK": 64})
    for index in (0, 1, 0, 1):
        device = torch.device("cuda", index)
        x, out, bias = torch.randn(64, device=device), torch.zeros(64, device=device), torch.zeros(1, device=device)
        launcher.bind(device, (1,), (bias, 3.0, 1, 64))(x, out)
        torch.testing.assert_close(out, x * 3)

"""What is read from the tool chain's listings, and what counts as a fault. Compiling itself is `make aot`."""

from __future__ import annotations

import pytest

from tests.aot.compile_all import SHARED_LIMIT, Outcome, count_instructions, parse_resources

USAGE = """
Resource usage:
 Common:
  GLOBAL:0
 Function matmul:
  REG:72 STACK:16 SHARED:1024 LOCAL:8 CONSTANT[0]:632 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
SASS = """
\t\tFunction : matmul
        /*0210*/                   STL [R1], R7 ;                          /* 0x0000000701007387 */
        /*0220*/              @!P0 LDL.LU.64 R6, [R1+0x10] ;               /* 0x0000100001067983 */
        /*0230*/                   HMMA.16816.F32.BF16 R4, R8, R10, R4 ;   /* 0x0000000a0804723c */
        /*0240*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4] ;  /* 0x00e00000041879f0 */
        /*0248*/                   QGMMA.64x128x32.F32.E4M3.E4M3 R24, gdesc[UR4] ;  /* 0x00e00000041879f3 */
        /*0250*/                   LDG.E R2, [R2.64] ;                     /* 0x0000000402027981 */
"""


def test_resources() -> None:
    assert parse_resources(USAGE) == (72, 16, 8)
    with pytest.raises(ValueError, match="want REG, STACK and LOCAL"):
        parse_resources("Fatal error")


def test_instructions() -> None:
    assert count_instructions(SASS, "LDL", "STL") == 2
    assert count_instructions(SASS, "HMMA") == 1
    assert count_instructions(SASS, "HGMMA", "QGMMA") == 2
    assert count_instructions(SASS, "HGMMA") == 1
    assert count_instructions(SASS, "LDGSTS") == 0


@pytest.mark.parametrize(
    ("outcome", "tensor_cores", "known_spills", "fault"),
    [
        (Outcome("k", 90, 1.0, hgmma=4), True, 0, ""),
        (Outcome("k", 80, 1.0, hmma=4), True, 0, ""),
        (Outcome("k", 90, 1.0), False, 0, ""),
        (Outcome("k", 90, 1.0), True, 0, "no tensor-core instruction"),
        (Outcome("k", 90, 1.0, spills=3, stack=8), False, 2, "spills: 3 LDL/STL"),
        (Outcome("k", 90, 1.0, spills=2, stack=8), False, 2, ""),
        (Outcome("k", 90, 1.0, local=64), False, 2, "64 B local"),
        (Outcome("k", 80, 1.0, shared=SHARED_LIMIT[80] + 1), False, 0, "of shared memory"),
        (Outcome("k", 90, 1.0, shared=SHARED_LIMIT[80] + 1), False, 0, ""),
        (Outcome("k", 90, 1.0, error="CompilationError: x"), True, 0, "CompilationError: x"),
    ],
)
def test_faults(outcome: Outcome, tensor_cores: bool, known_spills: int, fault: str) -> None:
    got = outcome.faults(tensor_cores, known_spills)
    assert bool(got) == bool(fault)
    assert fault in got


def test_tall_tiles_need_wgmma_where_there_is_one() -> None:
    assert Outcome("k", 90, 1.0, hmma=4).faults(True, 0, wgmma=True) == "no wgmma"
    assert Outcome("k", 80, 1.0, hmma=4).faults(True, 0, wgmma=True) == ""
    assert Outcome("k", 90, 1.0, hgmma=4).faults(True, 0, wgmma=True) == ""

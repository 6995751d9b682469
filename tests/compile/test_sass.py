"""The check of SASS itself, on code that was compiled once and came out wrong, and on the same code mended."""

from __future__ import annotations

import pytest
from sass import unset_operands

CODE = """
        /*0000*/                   UMOV UR9, 0x40000040 ;
        /*0010*/                   UMOV UR10, UR4 ;
        /*0020*/                   UMOV UR11, 0x40000040 ;
        /*0030*/              @!P0 BRA `(.L_x_9) ;
        /*0040*/                   UIADD3 UR8, UP1, UR21, 0x2, URZ ;
        /*0050*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT ;
        /*0060*/                   BRA `(.L_x_13) ;
.L_x_9:
        /*0070*/  {between}
        /*0080*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;
        /*0090*/                   HGMMA.64x64x16.F32.BF16 R88, R120, gdesc[UR8].tnspB, R88, gsb0 ;
.L_x_13:
        /*00a0*/                   EXIT ;
"""


@pytest.mark.parametrize(("between", "bad"), [
    ("UMOV UR8, UR21 ;", 0), ("ULOP3.LUT UP0, UR8, UR6, 0x1, URZ, 0xc0, !UPT ;", 0), ("UIADD3.64 UR8, UR32, 0x2 ;", 0),
    ("NOP ;", 1), ("@UP0 UMOV UR8, UR21 ;", 1), ("UISETP.GT.AND UP0, UPT, UR8, 0x1, UPT ;", 1),
])  # fmt: skip
def test_a_register_that_one_branch_sets_is_not_set_in_the_other(between, bad):
    found = unset_operands(CODE.format(between=between))
    assert len(found) == bad
    assert all(", gdesc[UR8], R24" in text for text in found)  # from R120 on, only the second half is read

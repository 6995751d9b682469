"""A check of SASS for sm_90: matrix products whose operands' addresses some path leaves unset.

A matrix instruction takes the addresses of its operands from four uniform registers, or two if the first operand is in
registers. ptxas 12.8 has been seen to write such a register in one of two branches and read it in both, and the kernel
to return wrong numbers where the other branch was taken. Registers that hold an older value are not noticed.
"""

from __future__ import annotations

import re

_ALL = (1 << 64) - 1  # a bit for each uniform register


def unset_operands(sass: str) -> list[str]:
    """The matrix instructions that read a uniform register which is not set on every path to them."""
    labels: dict[str, int] = {}
    found: list[str] = []
    for line in sass.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(found)
        elif instruction := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
            found.append(instruction[1])
    parsed = [_parse(text, labels) for text in found]
    on_entry = [_ALL] * len(found)
    on_entry[0] = 0
    waiting = [0]
    while waiting:
        at = waiting.pop()
        sets, _, targets, goes_on = parsed[at]
        known = on_entry[at] | sets
        for after in targets + [at + 1] * (goes_on and at + 1 < len(found)):
            if on_entry[after] & known != on_entry[after]:
                on_entry[after] &= known
                waiting.append(after)
    return [text for text, (_, reads, *_), known in zip(found, parsed, on_entry, strict=True) if reads & ~known]


def _parse(text: str, labels: dict[str, int]) -> tuple[int, int, list[int], bool]:
    """Uniform registers that an instruction sets for certain and reads as a product, its targets, and whether the next
    instruction may follow it."""
    match = re.match(r"(@!?U?P\w+\s+)?(\S+)\s*(.*)", text)
    assert match, text
    guard, operation, rest = match.groups()
    operands = [operand.strip() for operand in rest.split(",")]
    # A uniform predicate may come before the register that is set.
    place = operands[1] if len(operands) > 1 and operands[0].startswith("UP") else operands[0]
    sets = reads = 0
    if (register := re.fullmatch(r"UR(\d+)", place)) and not guard:
        sets = (0b11 if ".64" in operation or "WIDE" in operation else 0b1) << int(register[1])
    if operation.startswith("HGMMA") and (descriptor := re.search(r"gdesc\[UR(\d+)\]", rest)):
        in_registers = len(re.findall(r"\bR\d+", rest[: descriptor.start()])) > 1
        reads = (0b1100 if in_registers else 0b1111) << int(descriptor[1])
    jumps = operation.startswith(("BRA", "BRX"))
    targets = [labels[label] for label in re.findall(r"\.L_x_\d+", rest)] if jumps else []
    conditional = bool(guard) or (jumps and re.match(r"!?U?P\d", rest) is not None)
    return sets, reads, targets, conditional or not (jumps or operation == "EXIT")

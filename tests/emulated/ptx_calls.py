"""Device code to host code: the inline PTX of preprocessed C++ becomes calls of the emulated machine.

Reads what `g++ -E` wrote, of any header: an asm statement is a call of the function that INSTRUCTIONS has for its text,
with its operands in their order, outputs first. An instruction that is not listed becomes a call that stops with its
text, so that only what a kernel executes must be known.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

# What an asm statement's text holds -> the function of machine/device.h.
INSTRUCTIONS = (
    (r"mbarrier\.init", "mbarrier_init"),
    (r"mbarrier\.arrive\.expect_tx", "mbarrier_expect"),
    (r"mbarrier\.try_wait\.parity[\s\S]*bra", "mbarrier_wait"),
    # cp.async has an arrival of this name that raises the count first: not known here, it must not pass for this one.
    (r"(?<!cp\.async\.)mbarrier\.arrive\.shared::cta", "mbarrier_arrive"),
    (r"fence\.|griddepcontrol|setmaxnreg|prefetch", "nothing"),
    (r"bar\.sync %0", "barrier_sync"),
    (r"bar\.arrive %0", "barrier_arrive"),
    (r"bar\.red\.or\.pred", "barrier_any"),
    (r"cp\.async\.bulk\.tensor\.[45]d\.shared::cluster\.global\.mbarrier::complete_tx::bytes\.L2", "load_tensor"),
    (r"cp\.async\.bulk\.shared::cluster\.global\.mbarrier::complete_tx::bytes \[", "load_bytes"),
    (r"cp\.async\.bulk\.tensor\.[45]d\.global\.shared::cta\.bulk_group", "store_tensor"),
    (r"cp\.async\.bulk\.global\.shared::cta\.bulk_group \[", "store_bytes"),
    (r"cp\.reduce\.async\.bulk\.global\.shared::cta\.bulk_group\.add\.f32", "add_bytes"),
    (r"cp\.async\.bulk\.commit_group", "commit_stores"),
    (r"cp\.async\.bulk\.wait_group\.read", "wait_stores_read"),
    (r"cp\.async\.bulk\.wait_group ", "wait_stores"),
    (r"ldmatrix\.sync\.aligned\.x4\.m8n8\.shared", "ldmatrix"),
    (r"cp\.async\.c[ag]\.shared\.global", "copy_bytes"),
    (r"cp\.async\.mbarrier\.arrive\.noinc\.shared::cta", "arrive_with_copies"),
    (r"cp\.async\.(commit_group|wait_all)", "finish_copies"),
    (r"cp\.async\.wait_group", "nothing"),
    (r"ldmatrix\.sync\.aligned\.x4\.trans\.m8n8\.shared", "ldmatrix_transposed"),
    (r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.bf16", "mma<true>"),
    (r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.f16", "mma<false>"),
    (r"cvt\.rn\.f16x2\.e4m3x2 %0, low", "from_e4m3"),
    (r"cvt\.rn\.f16x2\.e4m3x2 %0, high", "from_e4m3_high"),
    (r"stmatrix\.sync\.aligned\.x4\.m8n8\.shared", "stmatrix"),
    (r"wgmma\.fence", "wgmma_fence"),
    (r"wgmma\.commit_group", "wgmma_commit"),
    (r"wgmma\.wait_group", "wgmma_wait"),
    (r"ex2\.approx\.ftz\.f32", "ex2"),
    (r"lg2\.approx\.ftz\.f32", "lg2"),
    (r"rcp\.approx\.ftz\.f32", "rcp"),
    (r"max\.NaN\.f32 %0, %0, 0fefa18f08;\s*min\.NaN\.f32 %0, %0, 0f6fa18f08", "clamp_to_1e29"),
    (r"max\.NaN\.f32 %0, %0, %1", "max_nan"),
    (r"min\.NaN\.f32 %0, %0, %1", "min_nan"),
    (r"fma\.rn\.sat\.f32", "fma_sat"),
    (r"mul\.rn\.sat\.f32", "mul_sat"),
    (r"neg\.f32", "neg"),
    (r"mov\.u32 %0, %%tid\.x", "thread_index"),
    (r"mov\.u32 %0, %%ctaid\.x", "block_index"),
    (r"mov\.u32 %0, %%nctaid\.x", "block_count"),
    (r"\{\s*\.reg \.b32 %%rx;\s*\.reg \.pred %%px;\s*elect\.sync %%rx\|%%px, %2;", "elect"),
    (r"mov\.u32 %0, %%laneid", "lane_index"),
    (r"mov\.u32 %0, %%clock", "clock"),
    (r"ld\.acquire\.gpu\.global\.s32", "load_acquire"),
    (r"st\.release\.gpu\.global\.s32|st\.relaxed\.gpu\.global\.s32", "store_word"),
    (r"red\.release\.gpu\.global\.add\.s32 \[%0\], 1", "increment"),
    (r"atom\.acq_rel\.gpu\.global\.add\.s32 %0, \[%1\], 1", "fetch_increment"),
    (r"atom\.acquire\.gpu\.global\.cas\.b32", "compare_and_swap"),
    (r"ld\.global\.cg\.v4\.f32", "load_four"),
)
WGMMA = re.compile(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.(bf16|f16)\.(?:bf16|f16)\b")
DYNAMIC_SHARED = re.compile(r"extern\s+FLASH_CUTE_SHARED\s+char\s+(\w+)\[\];")
STATIC_SHARED = re.compile(r"FLASH_CUTE_SHARED\s+(\w+)\s+([^;]*);")
LAUNCH = re.compile(r"(\w+(?:<[^;<>]*>)?)\s*<<<(.*?)>>>\(", re.S)
STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')
TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[(){}\[\]:,]', re.S)
LINE_MARKER = re.compile(r"^# \d+ .*$", re.M)
OPEN, CLOSE = "([{", ")]}"


def rewrite(source: str) -> str:
    source = DYNAMIC_SHARED.sub(r"char* const \1 = ::emu::shared_memory();", source)
    source = STATIC_SHARED.sub(declare_shared, source)
    source = LAUNCH.sub(r"(::emu::Grid{\2}->*[&](auto... args) { \1(args...); })(", source)
    pieces, end = [], 0
    for found in re.finditer(r"\basm\b\s*(?:volatile\b\s*)?\(", source):
        if found.start() < end:
            continue
        pieces.append(source[end : found.start()])
        sections, end = split_statement(source, found.end())
        pieces.append(call(*sections))
    return "".join([*pieces, source[end:]])


def declare_shared(found: re.Match[str]) -> str:
    """Shared variables that a kernel declares: each CTA has its own."""
    kind, names = found.groups()
    declarations = []
    for number, declarator in enumerate(re.split(r",\s*", names)):
        name, extent = re.findall(r"^(\w+)(.*)$", declarator, re.S)[0]
        place = f"{found.start()}{number}"
        declarations.append(f"auto& {name} = ::emu::shared_variable<{kind}{extent}>({place});")
    return " ".join(declarations)


def split_statement(source: str, begin: int) -> tuple[list[list[str]], int]:
    """The sections of an asm statement, each a list of what its commas divide, and where it ends."""
    sections: list[list[str]] = [[]]
    depth, last = 0, begin
    for token in TOKEN.finditer(source, begin):
        text = token.group()
        closes = text in CLOSE and depth == 0
        if text in OPEN:
            depth += 1
        elif text in CLOSE and not closes:
            depth -= 1
        elif depth == 0 and (closes or text in ":,"):
            piece = LINE_MARKER.sub("", source[last : token.start()]).strip()
            if piece:
                sections[-1].append(piece)
            if text == ":":
                sections.append([])
            last = token.end()
            if closes:
                return sections, last
    raise ValueError(f"an asm statement does not end: {source[begin : begin + 200]!r}")


def call(text: list[str], outputs: Sequence[str] = (), inputs: Sequence[str] = (), *_clobbers: list[str]) -> str:
    ptx = "".join(STRING.findall(text[0])).replace("\\n", "\n").replace("\\t", "\t")
    outs, ins = [operand(o) for o in outputs], [operand(i) for i in inputs]
    product = WGMMA.search(ptx)
    if product:
        n, kind = product.groups()
        in_registers = "_rs" if len(ins) > 8 else "_ss"
        arguments = ", ".join([outs[0], outs[-1], *ins])
        return f"::emu::wgmma{in_registers}<{n}, {str(kind == 'bf16').lower()}>({arguments})"
    if not ptx.strip():
        return f"::emu::opaque({', '.join(outs)})"
    for pattern, name in INSTRUCTIONS:
        if re.search(pattern, ptx):
            return f"::emu::{name}({', '.join([*outs, *ins])})"
    return f'::emu::not_emulated("{" ".join(ptx.split())[:120]}")'


def operand(text: str) -> str:
    """The expression of `"r"(x)`."""
    return text[text.index("(", text.index('"', 1)) :].strip()

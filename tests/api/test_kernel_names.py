"""What a kernel's name says of it, in each form that profilers and the compiler's report have."""

from __future__ import annotations

import re

import pytest

from flash_cute._kernel_names import TILE_FIELDS, kernel_matches
from flash_cute.inspect.build import default_csrc

DEMANGLED = (
    "void flash_cute::sm80::forward::rows::fwd_kernel<flash_cute::sm80::forward::rows::Traits<cutlass::half_t, 128, "
    "flash_cute::sm80::forward::rows::TileConfig{128, 64, 4, 1, false, 2}> >"
    "(flash_cute::FwdParams)"
)
OLD_DEMANGLED = DEMANGLED.replace(
    "flash_cute::sm80::forward::rows::TileConfig{128, 64, 4, 1, false, 2}",
    "(flash_cute::sm80::forward::rows::TileConfig){128, 64, (int)4, 1, (bool)0, 2}",
)
MANGLED = (
    "_ZN10flash_cute4sm807forward4rows10fwd_kernelINS1_6TraitsIN7cutlass6half_tELi128EXtl"
    "NS1_10TileConfigELi128ELi64ELi4ELi1ELb0ELi2EEEEEEEvNS_9FwdParamsE"
)
PLAN = {
    "family": "sm80::forward::rows",
    "tile": "",
    "kernel": "fwd_kernel",
    "dtype": "float16",
    "kernel_head_dim": 128,
    "mask": "causal",
    "block_m": 128,
    "block_n": 64,
    "threads": 128,
    "stages": 1,
    "ctas_per_sm": 2,
}


@pytest.mark.parametrize("name", [DEMANGLED, OLD_DEMANGLED, MANGLED], ids=["demangled", "old", "mangled"])
def test_kernel_names_are_understood(name):
    assert kernel_matches(PLAN, name)
    assert kernel_matches(
        PLAN | {"dtype": "bfloat16"}, name.replace("6half_t", "10bfloat16_t").replace("half_t", "bfloat16_t")
    )
    different = {
        "family": "sm90::forward::rows",
        "dtype": "bfloat16",
        "kernel_head_dim": 64,
        "block_m": 64,
        "block_n": 128,
        "threads": 256,
        "stages": 2,
    }
    for key, value in different.items():
        assert not kernel_matches(PLAN | {key: value}, name), key


DECODE = (
    "flash_cute::sm90::decode::split_keys::decode_kernel<"
    "flash_cute::sm90::decode::split_keys::Traits<cutlass::{0}, 192, 128>, "
    "flash_cute::sm90::decode::split_keys::BoxLoader<"
    "flash_cute::sm90::decode::split_keys::Traits<cutlass::{0}, 192, 128>>>"
)
DECODE_MANGLED = (
    "_ZN10flash_cute4sm906decode10split_keys13decode_kernelINS2_6TraitsIN7cutlass{}ELi192ELi128ES6_EENS2_9BoxLoaderIS7_"
    "EEEEvNS2_10KernelArgsE"
)


LONG_ROWS = (
    "flash_cute::sm90::decode::long_rows::long_rows_kernel<flash_cute::sm90::forward::rows::Traits<cutlass::half_t,"
    " 128, flash_cute::sm90::forward::rows::TileConfig{192, 80, 2, true, false},"
    " flash_cute::Variant{true, false, false}, 128>>"
)
LONG_ROWS_MANGLED = (
    "_ZN10flash_cute4sm906decode9long_rows16long_rows_kernelINS0_7forward4rows6TraitsIN7cutlass6half_tELi128EXtlNS4_"
    "10TileConfigELi192ELi80ELi2ELb1ELb0EEEXtlNS_7VariantELb1EEELi128EEEEEvNS2_10KernelArgsE"
)


@pytest.mark.parametrize("name", [LONG_ROWS, LONG_ROWS_MANGLED], ids=["demangled", "mangled"])
def test_names_of_the_kernel_of_long_sequences_are_understood(name):
    plan = {
        "family": "sm90::decode::long_rows",
        "kernel": "long_rows_kernel",
        "dtype": "float16",
        "tile": "",
        "kernel_head_dim": 128,
        "kernel_head_dim_v": 128,
        "variant": "cache",
        "threads": 512,
        "stages": 2,
    }
    assert kernel_matches(plan, name)
    different = {"family": "sm90::forward::rows", "dtype": "bfloat16", "kernel_head_dim": 80, "kernel_head_dim_v": 80}
    for key, value in different.items():
        assert not kernel_matches(plan | {key: value}, name), key


CHUNKS = (
    "flash_cute::sm90::decode::key_chunks::chunks_kernel<flash_cute::sm90::decode::key_chunks::Traits<"
    "cutlass::half_t, 128, (flash_cute::sm90::decode::key_chunks::Chunks)0>>"
)
CHUNKS_MANGLED = (
    "_ZN10flash_cute4sm906decode10key_chunks13chunks_kernelINS2_6TraitsIN7cutlass6half_tELi128ELNS2_6ChunksE0EEEEEv"
    "NS2_10KernelArgsE"
)


@pytest.mark.parametrize("name", [CHUNKS, CHUNKS_MANGLED], ids=["demangled", "mangled"])
@pytest.mark.parametrize("variant", ["cache", "packed"])
def test_names_of_row_invariant_kernels_are_understood(name, variant):
    plan = {
        "family": "sm90::decode::key_chunks",
        "kernel": "chunks_kernel",
        "dtype": "float16",
        "tile": "",
        "kernel_head_dim": 128,
        "kernel_head_dim_v": 128,
        "variant": variant,
        "threads": 512,
        "stages": 2,
    }
    assert kernel_matches(plan, name)
    different = {"family": "sm90::forward::rows", "dtype": "bfloat16", "kernel_head_dim": 64, "threads": 256}
    for key, value in different.items():
        assert not kernel_matches(plan | {key: value}, name), key
    one_chunk = name.replace("Chunks)0", "Chunks)1").replace("ChunksE0", "ChunksE1")
    assert kernel_matches(plan | {"threads": 256}, one_chunk) and not kernel_matches(plan, one_chunk)


STREAMED = (
    "flash_cute::sm80::decode::streamed::decode_kernel<"
    "flash_cute::sm80::decode::streamed::Traits<cutlass::bfloat16_t, 576, 512>>"
)
STREAMED_MANGLED = (
    "_ZN10flash_cute4sm806decode8streamed13decode_kernelINS2_6TraitsIN7cutlass10bfloat16_tELi576ELi512EEEEEv"
    "NS_12DecodeParamsEi"
)


@pytest.mark.parametrize("name", [STREAMED, STREAMED_MANGLED], ids=["demangled", "mangled"])
def test_names_of_kernels_of_large_caches_are_understood(name):
    plan = {
        "family": "sm80::decode::streamed",
        "kernel": "decode_kernel",
        "dtype": "bfloat16",
        "tile": "",
        "kernel_head_dim": 576,
        "kernel_head_dim_v": 512,
        "variant": "cache",
        "threads": 256,
        "stages": 7,
    }
    assert kernel_matches(plan, name)
    for key, value in {"family": "sm80::decode::split_keys", "dtype": "float16", "kernel_head_dim_v": 576}.items():
        assert not kernel_matches(plan | {key: value}, name), key


@pytest.mark.parametrize(
    "name", [DECODE.format("half_t"), DECODE_MANGLED.format("6half_t")], ids=["demangled", "mangled"]
)
def test_names_of_kernels_over_caches_are_understood(name):
    plan = {
        "family": "sm90::decode::split_keys",
        "kernel": "decode_kernel",
        "dtype": "float16",
        "tile": "",
        "kernel_head_dim": 192,
        "kernel_head_dim_v": 128,
        "variant": "cache",
        "threads": 160,
        "stages": 12,
    }
    assert kernel_matches(plan, name)
    different = {
        "family": "sm80::decode::split_keys",
        "dtype": "bfloat16",
        "kernel_head_dim": 128,
        "kernel_head_dim_v": 192,
    }
    for key, value in different.items():
        assert not kernel_matches(plan | {key: value}, name), key


def test_sm90_kernel_names_are_understood():
    sm90 = DEMANGLED.replace("sm80", "sm90").replace("{128, 64, 4, 1, false, 2}", "{128, 176, 2, true, false}")
    plan = PLAN | {"family": "sm90::forward::rows", "block_n": 176, "stages": 2, "threads": 384}
    assert kernel_matches(plan, sm90)
    assert not kernel_matches(plan | {"stages": 1}, sm90)
    assert not kernel_matches(PLAN, sm90)


@pytest.mark.parametrize(
    ("variant", "booleans"),
    [
        *(("dense", (0, 0, 0)), ("packed", (1, 0, 0)), ("modified", (1, 1, 0)), ("dense modified", (0, 1, 0))),
        *(("masked", (0, 0, 1)), ("masked modified", (0, 1, 1))),
    ],
)
@pytest.mark.parametrize("form", ["c++filt", "cu++filt", "mangled", "mangled, short"])
def test_variants_are_understood(variant: str, booleans: tuple[int, int, int], form: str) -> None:
    if form.startswith("mangled"):
        kept = [f"Lb{x}E" for x in booleans]
        while form == "mangled, short" and kept and kept[-1] == "Lb0E":
            kept.pop()
        name = MANGLED.replace("Li2EEEEEEE", f"Li2EEEXtlNS_7VariantE{''.join(kept)}EELi96EEEEE")
    else:
        words = [("false", "true")[x] if form == "c++filt" else f"(bool){x}" for x in booleans]
        name = DEMANGLED.replace("2}> >", f"2}}, flash_cute::Variant{{{', '.join(words)}}}, 96> >")
    plan = PLAN | {"variant": variant, "kernel_head_dim_v": 96}
    assert kernel_matches(plan, name)
    assert not kernel_matches(plan | {"variant": "packed" if variant == "modified" else "modified"}, name)
    assert not kernel_matches(plan | {"kernel_head_dim_v": 128}, name)


BACKWARD = (
    "void flash_cute::sm90::backward::dq_in_memory::bwd_kernel<"
    "flash_cute::sm90::backward::dq_in_memory::Traits<cutlass::bfloat16_t, 128, "
    "flash_cute::sm90::backward::dq_in_memory::TileConfig{64, 128, 2, true, 4}> >"
    "(flash_cute::sm90::backward::KernelArgs)"
)


def test_backward_kernel_names_are_understood():
    plan = PLAN | {
        "family": "sm90::backward::dq_in_memory",
        "kernel": "bwd_kernel",
        "dtype": "bfloat16",
        "mask": "full",
        "stages": 2,
    }
    plan |= {"block_m": 64, "block_n": 128, "threads": 384}
    assert kernel_matches(plan, BACKWARD)
    assert not kernel_matches(plan | {"kernel": "fwd_kernel"}, BACKWARD)
    assert not kernel_matches(plan | {"block_m": 128}, BACKWARD)
    assert not kernel_matches(plan, BACKWARD.replace("bwd_kernel", "bwd_convert_kernel"))
    assert not kernel_matches(plan, "void flash_cute::bwd_preprocess_kernel<cutlass::bfloat16_t>(int)")


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("form", ["({0})1", "true", "mangled"], ids=["cu++filt", "c++filt", "mangled"])
def test_the_deterministic_modes_kernel_is_told_apart(deterministic, form):
    if form == "mangled":
        tile = "".join(f"Li{number}E" for number in (64, 128, 4, 4, 4, 2, 1, 1, 2))
        name = (
            "_ZN10flash_cute4sm808backward12dq_in_memory10bwd_kernelINS1_6TraitsIN7cutlass10bfloat16_tELi64E"
            f"XtlNS1_10TileConfigE{tile}EEEELb%dEEEvNS_9BwdParamsE"
        )
        true, false = name % 1, name % 0
    else:
        name = (
            "void flash_cute::sm80::backward::dq_in_memory::bwd_kernel<"
            "flash_cute::sm80::backward::dq_in_memory::Traits<cutlass::bfloat16_t, 64, "
            "flash_cute::sm80::backward::dq_in_memory::TileConfig{64, 128, 4, 4, 4, 2, 1, 1, 2}>, %s>"
            "(flash_cute::BwdParams)"
        )
        flag = form.format("bool")
        true, false = name % flag, name % flag.replace("1", "0").replace("true", "false")
    plan = {
        **PLAN,
        **{
            "family": "sm80::backward::dq_in_memory",
            "kernel": "bwd_kernel",
            "dtype": "bfloat16",
            "kernel_head_dim": 64,
            "mask": "full",
        },
        **{"block_m": 64, "block_n": 128, "deterministic": deterministic},
    }
    assert kernel_matches(plan, true) == deterministic
    assert kernel_matches(plan, false) != deterministic
    assert not kernel_matches(plan | {"block_n": 64}, true)


@pytest.mark.parametrize(
    ("kernel", "traits", "variant"),
    [
        *(("sequences", t, v) for t in ("SequenceTraits", "PlainSequenceTraits") for v in ("packed", "modified")),
        *(("masked", t, v) for t in ("MaskedTraits", "PlainMaskedTraits") for v in ("masked", "masked modified")),
    ],
)
@pytest.mark.parametrize("deterministic", [True, False])
def test_kernels_of_sm80_that_read_sequences_or_a_mask(deterministic, variant, traits, kernel):
    tile = (64, 64, 4, 2, 2, 2, 1, 1, 2)
    kernel = f"bwd_{kernel}_kernel"
    names = (
        f"void flash_cute::sm80::backward::dq_in_memory::{kernel}<"
        f"flash_cute::sm80::backward::dq_in_memory::{traits}<cutlass::half_t, 128, "
        f"flash_cute::sm80::backward::dq_in_memory::TileConfig{{{', '.join(map(str, tile))}}}> >"
        "(flash_cute::BwdParams)",
        f"_ZN10flash_cute4sm808backward12dq_in_memory{len(kernel)}{kernel}"
        f"INS1_{len(traits)}{traits}IN7cutlass6half_tELi128E"
        f"XtlNS1_10TileConfigE{''.join(f'Li{number}E' for number in tile)}EEEEEEvNS_9BwdParamsE",
    )
    plan = {
        **PLAN,
        **{
            "family": "sm80::backward::dq_in_memory",
            "kernel": kernel,
            "variant": variant,
            "deterministic": deterministic,
            "mask": "full",
        },
        **{"block_m": 64, "block_n": 64, "threads": 128, "stages": 1},
    }
    for name in names:
        assert kernel_matches(plan, name)
        assert not kernel_matches(plan | {"kernel": "bwd_kernel"}, name)
        assert not kernel_matches(plan | {"block_n": 128}, name)
        assert not kernel_matches(plan, name.replace(kernel, "bwd_convert_sequences_kernel"))


@pytest.mark.parametrize("family", TILE_FIELDS)
def test_the_tiles_fields_are_the_headers(family):
    """The same fields in the same order: names of kernels have their values alone."""
    header = (default_csrc() / family.replace("::", "/") / "tile.h").read_text()
    members = re.search(r"struct TileConfig {(.*?)\n\n", header, re.DOTALL)[1]
    fields = re.findall(r"^  (?:int|bool) (\w+);", members, re.MULTILINE)
    assert list(TILE_FIELDS[family]) == [name.replace("ctas_per_sm", "budgeted_ctas") for name in fields]


@pytest.mark.parametrize(
    "name", ["", "void at::native::elementwise_kernel<128, 4>(int)", "flash_fwd_kernel<Flash_fwd_kernel_traits<128>>"]
)
def test_other_kernels_do_not_match(name):
    assert not kernel_matches(PLAN, name)


FP8 = "flash_cute::sm90::forward::fp8_rows"
FP8_MANGLED = "_ZN10flash_cute4sm907forward8fp8_rows10fwd_kernelINS2_6TraitsI"
FP8_ENDS = {
    "e4m3 e4m3 e4m3": "N7cutlass12float_e4m3_tES8_S8_",
    "e4m3 e4m3 e5m2": "N7cutlass12float_e4m3_tES8_NS7_12float_e5m2_tE",
    "e4m3 e5m2 e4m3": "N7cutlass12float_e4m3_tENS7_12float_e5m2_tES8_",
    "e4m3 e5m2 e5m2": "N7cutlass12float_e4m3_tENS7_12float_e5m2_tES9_",
    "e5m2 e4m3 e4m3": "N7cutlass12float_e5m2_tENS7_12float_e4m3_tES9_",
    "e5m2 e4m3 e5m2": "N7cutlass12float_e5m2_tENS7_12float_e4m3_tES8_",
    "e5m2 e5m2 e5m2": "N7cutlass12float_e5m2_tES8_S8_",
}


@pytest.mark.parametrize(("variant", "booleans"), [("dense", ""), ("packed", "true"), ("modified", "true, true")])
@pytest.mark.parametrize("formats", FP8_ENDS)
@pytest.mark.parametrize("form", ["c++filt", "cu++filt", "mangled"])
def test_float8_kernel_names_are_understood(form: str, formats: str, variant: str, booleans: str) -> None:
    of_q, of_k, of_v = formats.split()
    if form == "mangled":
        flags = "Lb1E" * booleans.count("true")
        variant_text = f"XtlNS_7VariantE{flags}EENS2_7FormatsI{FP8_ENDS[formats]}E"
        name = f"{FP8_MANGLED}Li192ELi128E{variant_text}EEEEvNS2_10KernelArgsE"
    else:
        types = ", ".join(f"cutlass::float_{x}_t" for x in (of_q, of_k, of_v))
        given, dims = f"flash_cute::Variant{{{booleans}}}", "192, 128"
        if form == "cu++filt":
            flags = ", ".join(f"(bool){int(i < booleans.count('true'))}" for i in range(2))
            given, dims = f"(flash_cute::Variant){{{flags}}}", "(int)192, (int)128"
        name = f"void {FP8}::fwd_kernel<{FP8}::Traits<{dims}, {given}, {FP8}::Formats<{types}> > >({FP8}::KernelArgs)"
    names = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}
    plan = {
        **{"family": "sm90::forward::fp8_rows", "kernel": "fwd_kernel", "tile": "", "variant": variant},
        **{"kernel_head_dim": 192, "kernel_head_dim_v": 128, "threads": 384, "stages": 2},
        **{"dtype": names[of_q], "dtype_k": names[of_k], "dtype_v": names[of_v]},
    }
    assert kernel_matches(plan, name)
    for field in ("dtype", "dtype_k", "dtype_v"):
        other = "float8_e5m2" if plan[field] == "float8_e4m3fn" else "float8_e4m3fn"
        assert not kernel_matches({**plan, field: other}, name), field
    for change in ({"kernel_head_dim": 128}, {"kernel_head_dim_v": 192}, {"variant": "dense modified"}):
        assert not kernel_matches({**plan, **change}, name), change
    assert not kernel_matches(PLAN, name)

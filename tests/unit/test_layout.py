"""The rules that forbid a split, each with its numbers."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_fleet import catalog
from vllm_fleet.layout import Layout, enumerate_layouts, reject_by_blocks, reject_by_shape, unproven_reason

M2_5 = catalog.load("minimax_m2_5")
NVFP4 = catalog.load("minimax_m2_5_nvfp4")


def shaped(**numbers: int) -> catalog.Card:
    return dataclasses.replace(M2_5, shape=dataclasses.replace(M2_5.shape, **numbers))


@pytest.mark.parametrize(
    ("card", "layout", "rule", "numbers"),
    [
        (M2_5, Layout(tensor_parallel=5), "heads_divisibility", ["48", "5"]),
        (M2_5, Layout(tensor_parallel=6), "kv_heads_divisibility", ["8", "6"]),
        (M2_5, Layout(pipeline_parallel=64), "layers_divisibility", ["62", "64"]),
        (M2_5, Layout(data_parallel=3, expert_parallel=True), "experts_divisibility", ["256", "3"]),
        (shaped(moe_intermediate_size=1538), Layout(tensor_parallel=4), "width_divisibility", ["1538", "4"]),
    ],
)
def test_shape_rules(card: catalog.Card, layout: Layout, rule: str, numbers: list[str]) -> None:
    rejection = reject_by_shape(card, layout)
    assert rejection is not None
    assert rejection.rule == rule
    assert all(number in rejection.reason for number in numbers)


@pytest.mark.parametrize("tensor_parallel", [1, 2, 4])
def test_m2_5_splits_over_1_2_and_4_ranks_in_every_version(tensor_parallel: int) -> None:
    """1536 / 1, / 2 and / 4 are multiples of 128."""
    layout = Layout(tensor_parallel=tensor_parallel)
    assert reject_by_shape(M2_5, layout) is None
    assert reject_by_blocks(M2_5, layout, (0, 24, 0)) is None
    assert unproven_reason(M2_5, layout, (0, 32, 0)) is None


def test_eight_ranks_cut_fp8_blocks_before_0_29() -> None:
    rejection = reject_by_blocks(M2_5, Layout(tensor_parallel=8), (0, 28, 0))
    assert rejection is not None
    assert rejection.rule == "fp8_block_divisibility"
    assert "1536 / 8 = 192" in rejection.reason
    assert "128" in rejection.reason
    assert "expert parallel" in rejection.reason


def test_eight_ranks_start_from_0_29_but_are_unproven() -> None:
    layout = Layout(tensor_parallel=8)
    assert reject_by_blocks(M2_5, layout, (0, 29, 0)) is None
    unproven = unproven_reason(M2_5, layout, (0, 29, 0))
    assert unproven is not None
    assert unproven.rule == "fp8_block_divisibility"
    assert "64x64" in unproven.reason


def test_sixteen_ranks_cut_even_refined_blocks() -> None:
    """1536 / 16 = 96 is no multiple of 64."""
    rejection = reject_by_blocks(M2_5, Layout(tensor_parallel=16), (0, 32, 0))
    assert rejection is not None
    assert "1536 / 16 = 96" in rejection.reason


def test_whole_experts_have_no_blocks_to_cut() -> None:
    layout = Layout(tensor_parallel=8, expert_parallel=True)
    assert reject_by_shape(M2_5, layout) is None
    assert reject_by_blocks(M2_5, layout, (0, 24, 0)) is None
    assert unproven_reason(M2_5, layout, (0, 32, 0)) is None


def test_nvfp4_groups_of_16_allow_eight_ranks() -> None:
    """1536 / 8 = 192 = 12 x 16; a width of 1544 / 8 = 193 would not do, in any version."""
    layout = Layout(tensor_parallel=8)
    assert reject_by_blocks(NVFP4, layout, (0, 24, 0)) is None
    odd = dataclasses.replace(NVFP4, shape=dataclasses.replace(NVFP4.shape, moe_intermediate_size=1544))
    rejection = reject_by_blocks(odd, layout, (0, 32, 0))
    assert rejection is not None
    assert (rejection.rule, "1544 / 8 = 193" in rejection.reason) == ("group_divisibility", True)


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (Layout(), "TP1"),
        (Layout(tensor_parallel=4), "TP4"),
        (Layout(tensor_parallel=8, expert_parallel=True), "TP8+EP"),
        (Layout(data_parallel=8, expert_parallel=True), "DP8+EP"),
        (Layout(tensor_parallel=4, pipeline_parallel=2), "TP4xPP2"),
    ],
)
def test_shorthand(layout: Layout, text: str) -> None:
    assert str(layout) == text


@given(gpus=st.integers(1, 16))
def test_enumeration_has_no_repeats_and_never_more_ranks_than_gpus(gpus: int) -> None:
    layouts = list(enumerate_layouts(M2_5, gpus))
    assert len(layouts) == len(set(layouts))
    assert all(1 <= layout.ranks <= gpus for layout in layouts)
    assert Layout(tensor_parallel=gpus) in layouts or gpus & (gpus - 1)


def test_dense_models_have_no_expert_parallel_layouts() -> None:
    dense = catalog.load("llama_3_3_70b")
    assert not any(layout.expert_parallel for layout in enumerate_layouts(dense, 8))

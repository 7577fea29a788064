"""Tiles of the GEMMs and the shared memory for their compressed scales: rules that hold for every row length."""

from __future__ import annotations

import dataclasses
import importlib
import itertools

import pytest

from conftest import ROOT

DEPTHS = range(128, 16384 + 1, 128)
UNASKED = 48 << 10
"""Shared memory that a program gets without requesting it; also the most that it may declare by itself, in PTX."""
OF_AN_SM = 227 << 10
LEAST_OF_A_PROGRAM = 99 << 10
"""Shared memory on sm_89 and sm_120, which have the least among the GPUs for which these tiles are."""
BANKS, BANK_BYTES = 32, 4
GATED = {(1280, 2560), (4096, 4096)}
"""(weight rows, K) of the shapes in the tables that are tuned with a gate."""
TABLES = [path.stem.replace("_", " ") for path in (ROOT / "torch-ext").rglob("tables/*.json")]


@pytest.fixture(scope="module")
def configs(bundle):
    return importlib.import_module(f"{bundle.__name__}.gemm.config")


@pytest.fixture(scope="module")
def plan(bundle):
    return importlib.import_module(f"{bundle.__name__}.gemm.smem_plan")


@pytest.fixture(scope="module")
def tiles(configs) -> set:
    """Every tile that a table or the default rule can choose."""
    assert TABLES
    found = {config for name in TABLES for entries in configs.load_table(name).values() for _, config in entries}
    for is_hopper, rows, experts, weight_rows in itertools.product(
        (False, True), (1, 8, 64, 512, 4096, 100_000), (1, 8, 512), (32, 1280, 8192)
    ):
        for depth in (128, 256, 640):
            found.add(configs.default_config(weight_rows, depth, rows, experts, 132, is_hopper))
    assert {config.warpgroup for config in found} == {False, True}
    return found


def geometry(plan, config, depth: int) -> tuple[int, int, int]:
    """A tile's (groups of a chunk, columns of a strip, bytes from row to row)."""
    groups, cols = config.block_k // 16, plan.strip_cols(config, depth)
    return groups, cols, plan.strip_stride(cols, groups)


def test_rows_of_whole_words_are_read_compressed_until_they_are_too_long(plan):
    read = [depth for depth in range(32, 20000, 32) if plan.reads_compressed(depth, has_warpgroups=True)]
    assert read == list(range(128, 12160 + 1, 128))
    read = [depth for depth in range(32, 30000, 32) if plan.reads_compressed(depth, has_warpgroups=False)]
    assert read[:192] == list(range(128, 24576 + 1, 128)) and 28672 in read and all(depth % 128 == 0 for depth in read)


def test_what_is_said_to_be_read_compressed_has_a_tile(configs, plan):
    """On GPUs without warpgroup products, for every default tile."""
    tiles = {configs.default_config(1280, depth, rows, 8, 132, False) for depth in (128, 256) for rows in (1, 100, 999)}
    for depth, tile, result_bytes in itertools.product(range(128, 60000, 128), tiles, (1, 2, 4)):
        if plan.reads_compressed(depth, has_warpgroups=False) and depth % tile.block_k == 0:
            assert plan.strip_bytes(plan.with_strip(tile, depth, result_bytes), depth) <= UNASKED


def test_a_tile_for_rows_that_no_strip_takes_is_refused(plan):
    tile = plan.Config(64, 128, 64, 4, 4, 1, warpgroup=True)
    with pytest.raises(ValueError, match="K: expected rows whose scales fit in 49152 bytes, got 16000"):
        plan.with_strip(tile, 16000)
    assert plan.with_strip(plan.Config(64, 128, 8, 4, 3, 3), 16000).block_n == 32


def test_every_tile_gets_its_shared_memory(plan, tiles):
    """No kernel declares more than it may, everything fits in an SM, and what is beyond 48 KB is requested. Triton does
    that if its own part is larger than 48 KB, either the ring alone, or with the memory for rearranging results."""
    for depth, config, result_bytes in itertools.product(DEPTHS, tiles, (1, 2, 4)):
        if not plan.reads_compressed(depth, has_warpgroups=True):
            continue
        tile = plan.with_strip(config, depth, result_bytes)
        where = f"K {depth}, {result_bytes} bytes: {config} became {tile}"
        declared = plan.strip_bytes(tile, depth)
        ring = tile.num_stages * plan.stage_bytes(tile)
        rearranged = tile.block_n * tile.block_t * result_bytes
        assert declared <= UNASKED, where
        # The results of a large tile are rearranged in parts, as scripts/compile_kernels.py shows.
        assert ring + min(rearranged, (32 if result_bytes == 4 else 16) << 10) + declared <= OF_AN_SM, where
        assert ring > UNASKED or ring + rearranged + declared <= UNASKED, where
        assert tile.warpgroup or ring + rearranged + declared <= LEAST_OF_A_PROGRAM, where
        assert tile.block_n in (32, 64, 128, 256) and tile.block_n >= 16 * tile.num_warps, where
        assert tile.num_stages % tile.chunks_at_once == 0 and tile.num_stages > tile.chunks_at_once, where
        assert plan.with_strip(tile, depth, result_bytes) == tile, where


def test_dense_scales_come_whole_only_where_memory_is_left(plan, tiles):
    """Warpgroup tiles still run beside as many others as they were tuned for."""
    found = set()
    for depth, tile, result_bytes in itertools.product((64, *DEPTHS), tiles, (1, 2, 4)):
        if not plan.comes_whole(tile, depth, result_bytes):
            continue
        found.add((tile.warpgroup, tile.num_warps > 4))
        declared = plan.strip_bytes(tile, depth)
        assert depth % 128 == 0 and declared <= UNASKED, (depth, tile)
        parts = plan.num_parts(tile)
        results = tile.block_n // parts * tile.block_t * result_bytes
        shared = (
            tile.num_stages * plan.stage_bytes(tile) + declared + min(results, (32 if result_bytes == 4 else 16) << 10)
        )
        programs = tile.programs_per_sm if tile.warpgroup else 1
        assert programs * (shared + 1024) <= OF_AN_SM + 1024, (depth, tile, result_bytes)
        words_a_lane = tile.block_n * depth // (16 * 8 * 32 * tile.num_warps)
        assert words_a_lane <= 20, (depth, tile)
    assert found == {(False, False), (True, False), (True, True)}


def test_tuned_tiles_of_compressed_scales_run_as_they_were_tuned(configs, plan):
    """For 16-bit results; others may need a deeper ring."""
    for name in TABLES:
        for (weight_rows, depth, compressed), entries in configs.load_table(name).items():
            result_bytes = 1 if (weight_rows, depth) in GATED else 2
            if compressed:
                assert [config for _, config in entries if plan.with_strip(config, depth, result_bytes) != config] == []


def test_every_call_is_summed_in_one_order_and_occupies_the_device(configs, monkeypatch):
    """Dense and compressed scales fall back to the default in the same cases, and tiles that are too few to occupy the
    device are never chosen if there are smaller ones."""
    sms = 132
    monkeypatch.setattr(configs, "num_sms", lambda device: sms)
    monkeypatch.setattr(configs.torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(configs.torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    shapes = {(rows, depth) for rows, depth, _ in configs.load_table("NVIDIA H200")} | {(96, 384), (8192, 640)}
    counts = itertools.product((1, 8, 15, 16, 17, 64, 128, 512, 4096, 131_072), (1, 3, 8, 128, 512))
    for (weight_rows, depth), (rows, experts) in itertools.product(shapes, counts):
        call = (weight_rows, depth, rows, experts)
        dense, compressed = (
            configs.choose_config.__wrapped__(None, *call, 2, is_compressed) for is_compressed in (False, True)
        )
        orders = {(config.block_k, config.warpgroup) for config in (dense, compressed)}
        assert len(orders) == 1, (call, dense, compressed)
        if configs.num_tiles(dense, *call[:1], *call[2:]) < sms:
            default = configs.default_config(*call, sms, True)
            assert dense == default, (call, dense)


def test_tiles_are_changed_only_where_they_must_be(plan, tiles):
    for depth, config in itertools.product(DEPTHS, tiles):
        if not plan.reads_compressed(depth, has_warpgroups=True):
            continue
        tile = plan.with_strip(config, depth)
        if tile.block_n < config.block_n:
            wide = dataclasses.replace(tile, block_n=2 * tile.block_n)
            beside = plan.strip_bytes(wide, depth) + wide.block_n * wide.block_t * 4
            rings = (n * plan.stage_bytes(wide) for n in itertools.count(config.num_stages, config.chunks_at_once))
            ring = next(ring for ring in rings if ring > UNASKED or ring + beside <= UNASKED)
            too_much = ring + beside > LEAST_OF_A_PROGRAM and not config.warpgroup
            assert too_much or plan.strip_bytes(wide, depth) > UNASKED, (depth, config, tile)
        else:
            assert dataclasses.replace(tile, num_stages=config.num_stages) == config, (depth, config, tile)
            if tile.num_stages < config.num_stages:
                more = (tile.num_stages + 1) * plan.stage_bytes(tile) + plan.strip_bytes(tile, depth)
                assert more + (32 << 10) > OF_AN_SM, (depth, config, tile)
            elif tile != config:
                beside = plan.strip_bytes(tile, depth) + tile.block_n * tile.block_t * 4
                fewer = (tile.num_stages - tile.chunks_at_once) * plan.stage_bytes(tile)
                assert fewer <= UNASKED < fewer + beside, (depth, config, tile)


def test_strips_meet_the_rules_of_banks_and_vectors(plan, tiles):
    for depth, config in itertools.product(DEPTHS, tiles):
        if not plan.reads_compressed(depth, has_warpgroups=True):
            continue
        tile = plan.with_strip(config, depth)
        groups, cols, stride = geometry(plan, tile, depth)
        where = f"K {depth}, {tile}: {cols} columns, {stride} bytes a row"
        assert stride % groups == 0 and stride // groups % 2 == 1, where
        assert cols <= stride < cols + 2 * groups, where
        assert stride % 8 == 0 and cols % 8 == 0, where  # words of 8 codes are stored as 8 bytes at once
        assert tile.block_n * stride % 256 == 0, where  # what new_strip sets to 0 at a time
        # A load reads a chunk of 8 rows, in passes of 128 bytes, each of which accesses every bank at most once.
        rows = min(8, BANKS * BANK_BYTES // groups)
        banks = [
            (row * stride + byte) // BANK_BYTES % BANKS for row in range(rows) for byte in range(0, groups, BANK_BYTES)
        ]
        assert len(set(banks)) == len(banks), where


def test_slices_divide_rows_into_whole_chunks(plan, tiles):
    for depth, config in itertools.product(DEPTHS, tiles):
        groups, all_cols = config.block_k // 16, depth // 16
        cols = plan.strip_cols(config, depth)
        assert all_cols % cols == 0, (depth, config)
        if cols == all_cols:
            assert config.warpgroup or all_cols <= config.max_cols or all_cols % (2 * groups), (depth, config)
            continue
        assert cols % groups == 0, (depth, config)
        assert cols <= config.max_cols or cols % (2 * groups), (depth, config)


def test_dense_and_compressed_scales_are_summed_in_one_order(configs, plan, tiles):
    """Chunks of K and the kind of product determine the order of sums, so dense, staged and fused results have the same
    bits."""
    for name in TABLES:
        table = configs.load_table(name)
        for (rows, depth, compressed), entries in table.items():
            dense = table[rows, depth, False]
            assert [(r, c.block_k, c.warpgroup) for r, c in entries] == [
                (r, c.block_k, c.warpgroup) for r, c in dense
            ], (name, rows, depth, compressed)
    for depth, config in itertools.product(
        (depth for depth in DEPTHS if plan.reads_compressed(depth, has_warpgroups=True)), tiles
    ):
        tile = plan.with_strip(config, depth)
        assert (tile.block_k, tile.warpgroup) == (config.block_k, config.warpgroup), (depth, config)


def test_kernels_in_triton_decode_equal_parts_of_a_row(configs):
    """Whole blocks of columns, no more at a time than configured; for dense scales all of them."""
    for depth in range(32, 40000, 32):
        for config in (configs.PORTABLE, configs.scaled_config(1, True), configs.BlockConfig(64, 64, 16, max_cols=32)):
            tile = configs.plan_blocks(config, 640, depth, compressed=True)
            cols, parts = depth // 16, -(-depth // (16 * tile.COLS))
            assert tile.COLS % 32 == 0 and 16 * tile.COLS % config.block_k == 0 and config.max_cols >= tile.COLS
            assert tile.COLS * parts - cols < 32 * (parts + 1), (depth, config)
            assert cols <= configs.plan_blocks(config, 640, depth, compressed=False).COLS

"""Prompts have exactly the tokens asked for, and share prefixes exactly where the trace does."""

import json

import pytest

from controlplane.gateway.replay.prompts import FIRST_ID, IDS, POOL_TOKENS, Prompts


def ids(prompts: Prompts, tokens: int, blocks: tuple[int, ...] = ()) -> list[int]:
    return json.loads(b"[" + prompts.ids(tokens, blocks) + b"]")


@pytest.mark.parametrize("tokens", [1, 2, 511, 4096, POOL_TOKENS, POOL_TOKENS + 1, 2 * POOL_TOKENS + 7])
def test_the_length_is_exact(tokens: int) -> None:
    sent = ids(Prompts(1), tokens)
    assert len(sent) == tokens
    assert FIRST_ID <= min(sent) <= max(sent) < FIRST_ID + IDS


@pytest.mark.parametrize("tokens", [1, 511, 512, 513, 1024, 1500])
def test_so_it_is_with_prefix_blocks(tokens: int) -> None:
    assert len(ids(Prompts(1), tokens, (0, 7, 46))) == tokens


def test_equal_blocks_are_equal_ids_and_others_are_not() -> None:
    prompts = Prompts(1)
    first, second = ids(prompts, 1500, (46, 47, 48)), ids(prompts, 1536, (46, 47, 99))
    assert first[:1024] == second[:1024]
    assert first[1024:1040] != second[1024:1040]
    blocks = {tuple(ids(prompts, 16, (block,))) for block in range(200_000, 205_000)}
    assert len(blocks) == 5000
    again = ids(Prompts(1), 1500, (46, 47, 48))
    assert again == first


def test_prompts_without_blocks_never_begin_alike() -> None:
    prompts = Prompts(1)
    beginnings = {tuple(ids(prompts, 20)[:16]) for _ in range(5000)}
    assert len(beginnings) == 5000


def test_a_seed_fixes_them() -> None:
    assert Prompts(3).ids(50) == Prompts(3).ids(50) != Prompts(4).ids(50)
